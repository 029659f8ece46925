// The device stage over the double of CUDA's driver: copies that end late, cancels, closing, calls that fail.
#include <cerrno>
#include <thread>

#include "cuda_driver.h"
#include "native_cuda_double.h"

namespace {

std::shared_ptr<Engine> started(uint32_t threads, uint32_t slots) {
  return Engine::start({threads, 1024, kPiece, kPiece, 0, slots, 2 * kPiece});
}

void late_copies_land_whole(const Double& cuda) {
  const int fd = records(file("device"), 24);
  cuda.delay(300);
  for (uint32_t slots = 1; slots <= 3; slots++) {
    auto engine = started(3, slots);
    std::vector<std::thread> users;
    for (int user = 0; user < 3; user++)
      users.emplace_back([&] {
        Pages target(24 * kSlabsBytes);
        std::vector<OpSpec> specs;
        for (uint64_t i = 0; i < 24; i++) {
          uint8_t* address = target.data + i * kSlabsBytes;
          specs.push_back(i % 5 == 4 ? record(kRead, fd, i, address) : device_record(fd, i, address));
        }
        auto batch = submitted(*engine, specs);
        CHECK(batch->wait(60s));
        for (uint64_t i = 0; i < 24; i++)
          CHECK(batch->op(i).error == 0 && landed(target.data + i * kSlabsBytes, i));
      });
    for (std::thread& user : users) user.join();
    CHECK(engine->close(20s));
    cuda.check_clean();
  }
  cuda.delay(0);
  ::close(fd);
}

void cancels_and_closing_race_with_copies(const Double& cuda) {
  const int fd = records(file("device-cancel"), 8);
  cuda.delay(100);
  for (int round = 0; round < 40; round++) {
    auto engine = started(2, 2);
    {
      Pages target(8 * kSlabsBytes);
      std::vector<OpSpec> specs;
      for (uint64_t i = 0; i < 8; i++) specs.push_back(device_record(fd, i, target.data + i * kSlabsBytes));
      auto batch = submitted(*engine, specs);
      std::thread other([&] { round % 2 ? engine->cancel(batch) : static_cast<void>(engine->close(20s)); });
      CHECK(batch->wait(20s));
      for (uint64_t i = 0; i < 8; i++) {
        CHECK(batch->op(i).error == ECANCELED || batch->op(i).error == 0);
        CHECK(batch->op(i).error != 0 || landed(target.data + i * kSlabsBytes, i));
      }
      other.join();
    }  // the target goes: whatever is still copied to it is seen
    CHECK(engine->close(20s));
    cuda.check_clean();
  }
  cuda.delay(0);
  ::close(fd);
}

void calls_that_fail_are_that_operations_error(const Double& cuda) {
  const int fd = records(file("device-fail"), 12);
  cuda.delay(200);
  for (const char* call : {"cuMemcpyHtoDAsync", "cuEventRecord", "cuEventSynchronize", "cuEventQuery"}) {
    auto engine = started(2, 2);
    {
      Pages target(12 * kSlabsBytes);
      std::vector<OpSpec> specs;
      for (uint64_t i = 0; i < 12; i++) specs.push_back(device_record(fd, i, target.data + i * kSlabsBytes));
      cuda.fail(call, 5, 1, 2);
      auto batch = submitted(*engine, specs);
      CHECK(batch->wait(60s));
      int failed = 0;
      for (uint64_t i = 0; i < 12; i++) {
        CHECK(batch->op(i).error == EREMOTEIO || batch->op(i).error == 0);
        CHECK(batch->op(i).error != 0 || landed(target.data + i * kSlabsBytes, i));
        failed += batch->op(i).error != 0;
      }
      CHECK(failed <= 1);
      cuda.fail("", 0, 0, 0);
    }
    CHECK(engine->close(20s));
    cuda.check_clean();
  }
  cuda.delay(0);
  ::close(fd);
}

void late_copies_of_neighbours(const Double& cuda) {
  cuda.delay(50);
  auto engine = started(3, 2);
  neighbours_race(*engine, kOnDevice);
  CHECK(engine->close(20s));
  cuda.check_clean();
  cuda.delay(0);
}

}  // namespace

void device_stage_is_clean(const std::string& driver) {
  use_cuda_library(driver.c_str());
  const Double cuda(driver);
  late_copies_land_whole(cuda);
  cancels_and_closing_race_with_copies(cuda);
  calls_that_fail_are_that_operations_error(cuda);
  late_copies_of_neighbours(cuda);
}
