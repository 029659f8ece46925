// Range reads over the double of CUDA's driver: ranges with gaps and rows, cancels, calls that fail, sums.
#include <cerrno>
#include <thread>

#include "cuda_driver.h"
#include "native_cuda_double.h"
#include "range_job.h"

namespace {

constexpr int64_t kBytes = 30 * kPageBytes + 77;

uint8_t byte_at(int64_t offset) { return static_cast<uint8_t>(offset / 251 + offset); }

int content() {
  const int fd = file("ranges");
  std::vector<uint8_t> bytes(kBytes);
  for (int64_t i = 0; i < kBytes; i++) bytes[static_cast<size_t>(i)] = byte_at(i);
  CHECK(pwrite(fd, bytes.data(), bytes.size(), 0) == kBytes);
  return fd;
}

// Exact memory of a read: what lands beyond it or late is seen.
struct Read {
  Pages rows{10 * kPageBytes}, all{32 * kPageBytes};
  std::vector<uint64_t> sums = std::vector<uint64_t>(31);
  const bool cached;
  std::shared_ptr<RangeJob> job;

  // Cached: no sums, the second copy is that of the last page alone, and gaps between rows are not read.
  Read(const std::shared_ptr<RangeSlots>& slots, int fd, bool on_device, bool cached = false) : cached(cached) {
    const int64_t first = cached ? kBytes - 77 : 0;
    const RangeCopy two[] = {{0, 5, 20, 1000, 6000, 0, 0, 1000}, {0, first, 1, kBytes - first, 0, 1, first, 0}};
    const auto address = [](const Pages& pages) { return reinterpret_cast<uint64_t>(pages.data); };
    job = std::make_shared<RangeJob>(
        slots, RangePlan({{fd, kBytes, cached ? nullptr : sums.data(), nullptr, cached}}, {two[0], two[1]},
                         4 * kPageBytes, kPageBytes),
        std::vector<RangeTarget>{{address(rows), on_device}, {address(all), on_device}});
    job->start();
  }
  bool landed() const {
    for (int64_t i = cached ? kBytes - 77 : 0; i < kBytes; i++)
      if (all.data[i] != byte_at(i)) return false;
    for (int64_t i = 0; i < 20 * 1000; i++)
      if (rows.data[i] != byte_at(5 + i / 1000 * 6000 + i % 1000)) return false;
    return cached ? job->bytes_read() == 20 * 1000 + 77 : sums[30] != 0;
  }
};

std::shared_ptr<RangeSlots> slots_of(int device) {
  return std::make_shared<RangeSlots>(RangeOptions{3, 2, 4 * kPageBytes, kPageBytes, device, 0});
}

}  // namespace

void range_reads_are_clean(const std::string& driver) {
  use_cuda_library(driver.c_str());
  const Double cuda(driver);
  const int fd = content();
  cuda.delay(20);
  for (int device = -1; device < 1; device++) {
    auto slots = slots_of(device);
    slots->prepare();
    for (int round = 0; round < 6; round++) {
      const bool cached = round % 2 == 1;
      Read read(slots, fd, device == 0, cached);
      CHECK(read.job->wait(20s) && read.job->failure().error == 0 && read.landed());
      CHECK(read.job->bytes_landed() == 20 * 1000 + (cached ? 77 : kBytes));
    }
    for (int round = 0; round < 20; round++) {
      Read read(slots, fd, device == 0);
      std::this_thread::sleep_for(std::chrono::microseconds(round * 50));
      read.job->cancel();
      CHECK(read.job->wait(20s) && read.job->failure().error == 0);
    }
    for (int64_t after = 0; after < 12 && device == 0; after++) {
      cuda.fail("cuMemcpyHtoDAsync cuMemcpy2DAsync cuEventRecord cuEventSynchronize cuMemHostRegister", after, 1, 2);
      Read read(slots_of(device), fd, true);
      CHECK(read.job->wait(20s) && (read.job->failure().error == EREMOTEIO || read.landed()));
      cuda.fail("", 0, 0, 0);
    }
  }
  cuda.delay(0);
  // The last reference to a read may be a thread's.
  for (int i = 0; i < 2000 && cuda.outstanding() != 0; i++) std::this_thread::sleep_for(10ms);
  cuda.check_clean();
  ::close(fd);
}
