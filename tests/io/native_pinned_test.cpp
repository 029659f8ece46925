// Pinned files over the double of CUDA's driver: pinning, forgetting and closing race with reads.
#include <cerrno>
#include <thread>

#include "cuda_driver.h"
#include "native_cuda_double.h"
#include "transfer.h"

namespace {

constexpr uint64_t kRecords = 24;
constexpr int64_t kFileBytes = static_cast<int64_t>(kRecords * kRecord);

int memory_file(const std::string& path) {
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  CHECK(fd >= 0);
  return records(fd, kRecords);
}

void read_all(Engine& engine, int fd) {
  Pages target(kRecords * kSlabsBytes);
  std::vector<OpSpec> specs;
  for (uint64_t i = 0; i < kRecords; i++) specs.push_back(device_record(fd, i, target.data + i * kSlabsBytes));
  auto batch = submitted(engine, specs);
  CHECK(batch->wait(60s));
  for (uint64_t i = 0; i < kRecords; i++)
    CHECK(batch->op(i).error == 0 && landed(target.data + i * kSlabsBytes, i));
}

// A copy from a file that was let go of too early is a fault of the double, or reads what is not mapped any more.
void pinning_races_with_reads(const Double& cuda, const std::string& path) {
  const int fd = memory_file(path);
  cuda.delay(100);
  for (int round = 0; round < 10; round++) {
    auto engine = Engine::start({3, 1024, kPiece, kPiece, 0, 2, 2 * kPiece});
    std::thread pinner([&] {
      for (int64_t end = 3 * kPageBytes; end < kFileBytes; end += 7 * kPageBytes) engine->pin_file(fd, end);
      engine->pin_file(fd, kFileBytes);
    });
    for (int i = 0; i < 3; i++) read_all(*engine, fd);
    pinner.join();
    const uint64_t before = reads_issued();
    read_all(*engine, fd);
    CHECK(reads_issued() == before);
    if (round % 2 == 0) {
      engine->forget(fd);
      read_all(*engine, fd);
      CHECK(reads_issued() > before);
    }
    CHECK(engine->close(20s));
    engine.reset();
    cuda.check_clean();
  }
  cuda.delay(0);
  ::close(fd);
}

void closing_races_with_copies(const Double& cuda, const std::string& path) {
  const int fd = memory_file(path);
  cuda.delay(200);
  for (int round = 0; round < 20; round++) {
    auto engine = Engine::start({2, 1024, kPiece, kPiece, 0, 2, 2 * kPiece});
    engine->pin_file(fd, kFileBytes);
    Pages target(kRecords * kSlabsBytes);
    std::vector<OpSpec> specs;
    for (uint64_t i = 0; i < kRecords; i++) specs.push_back(device_record(fd, i, target.data + i * kSlabsBytes));
    auto batch = submitted(*engine, specs);
    std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
    CHECK(engine->close(20s) && batch->wait(20s));
    for (uint64_t i = 0; i < kRecords; i++)
      CHECK(batch->op(i).error == ECANCELED || landed(target.data + i * kSlabsBytes, i));
    engine.reset();
    cuda.check_clean();
  }
  cuda.delay(0);
  ::close(fd);
}

}  // namespace

void pinned_files_are_copied(const std::string& driver, const std::string& tmpfs) {
  if (tmpfs.empty()) return;
  use_cuda_library(driver.c_str());
  const Double cuda(driver);
  pinning_races_with_reads(cuda, tmpfs + "/pinned-races");
  closing_races_with_copies(cuda, tmpfs + "/pinned-closing");
}
