// The engine under the sanitizers, which no Python process could load: many threads, cancels, hung reads, closing.
// Built and run by test_sanitizers.py. Exit status 0 and no word from a sanitizer: passed.
#include <algorithm>
#include <cerrno>
#include <thread>

#include "checksum.h"
#include "native_support.h"

namespace {

std::shared_ptr<Engine> started(uint32_t threads) { return Engine::start({threads, 1024, kPiece, kPiece}); }

void sums_agree() {
  std::vector<uint8_t> data(4 * kPageBytes);
  for (size_t i = 0; i < data.size(); i++) data[i] = static_cast<uint8_t>(i * 37 + 11);
  for (size_t pairs = 0; pairs <= data.size() / 8 - 1; pairs += pairs < 600 ? 1 : 97)
    for (int which = 1; which < kInstructionSets; which++) {
      const InstructionSet& set = instruction_sets()[which];
      if (!set.usable) continue;
      // One byte off, so that an aligned load would trap.
      const uint64_t first = 0xFFFFFFF0u + pairs;
      CHECK(set.sum(data.data() + 1, pairs * 8, 0x0123456789ABCDEFull, first) ==
            instruction_sets()[0].sum(data.data() + 1, pairs * 8, 0x0123456789ABCDEFull, first));
    }
  CHECK(crc32(reinterpret_cast<const uint8_t*>("123456789"), 9) == 0xCBF43926u);
}

void round_trips_from_many_threads() {
  auto engine = started(4);
  std::vector<std::thread> users;
  for (int user = 0; user < 4; user++)
    users.emplace_back([&engine, user] {
      const int fd = file("many" + std::to_string(user));
      Pages out(kRecord), in(kSlabs * kSlab);
      for (uint64_t number = 0; number < 12; number++) {
        for (size_t i = 0; i < kSlabs * kSlab; i += 64) out.data[kPageBytes + i] = static_cast<uint8_t>(i ^ number);
        auto write = submitted(*engine, {record(kWrite, fd, number, out.data)});
        CHECK(write->wait(20s) && write->op(0).error == 0);
        std::vector<uint64_t> sums;
        for (uint32_t i = 0; i < kSlabs; i++) sums.push_back(write->sum(i));
        sums[3] ^= number % 2;
        auto read = submitted(*engine, {record(kRead, fd, number, in.data)}, sums);
        CHECK(read->wait(20s) && read->op(0).error == 0);
        for (uint32_t i = 0; i < kSlabs; i++) CHECK(read->is_bad(read->op(0), i) == (i == 3 && number % 2));
        CHECK(std::memcmp(in.data, out.data + kPageBytes, kSlabs * kSlab) == 0);
      }
      ::close(fd);
    });
  for (std::thread& user : users) user.join();
  CHECK(engine->close(5s));
}

void cancels_race_with_the_work() {
  auto engine = started(3);
  const int fd = file("cancel");
  Pages arena(8 * kRecord);
  for (int round = 0; round < 200; round++) {
    std::vector<OpSpec> specs;
    for (uint64_t number = 0; number < 8; number++)
      specs.push_back(record(kWrite, fd, number, arena.data + number * kRecord));
    auto batch = submitted(*engine, specs);
    std::thread other([&] { engine->cancel(batch); });
    if (round % 2) engine->cancel(batch);
    CHECK(batch->wait(20s));
    other.join();
    for (size_t i = 0; i < batch->size(); i++) CHECK(batch->op(i).error == 0 || batch->op(i).error == ECANCELED);
  }
  CHECK(engine->close(5s));
  ::close(fd);
}

void closing_while_submitting() {
  for (int round = 0; round < 50; round++) {
    auto engine = started(2);
    const int fd = file("close");
    Pages arena(20 * kRecord);
    std::vector<std::shared_ptr<Batch>> batches;
    std::thread user([&] {
      for (uint64_t i = 0; i < 20; i++) {
        const OpSpec spec = record(kWrite, fd, i, arena.data + i * kRecord);
        const std::vector<uint64_t> none(kSlabs);
        auto batch = std::make_shared<Batch>(&spec, 1, none.data());
        const int error = engine->submit(batch);
        CHECK(error == 0 || error == ESHUTDOWN);
        if (error == 0) batches.push_back(batch);
      }
    });
    CHECK(engine->close(10s));
    user.join();
    for (auto& batch : batches) CHECK(batch->wait(10s));
    ::close(fd);
  }
}

void files_seem_to_hang_while_they_are_used() {
  // No call has returned for 0 s in any file: all files wait for those under way, and threads come and go.
  auto engine = started(3);
  std::atomic<bool> ends{false};
  std::thread other([&] {
    for (int round = 0; !ends; round++) engine->widen(round % 3 ? 0s : 60s);
  });
  std::vector<std::thread> users;
  for (int user = 0; user < 3; user++)
    users.emplace_back([&engine, user] {
      const int fd = file("hangs" + std::to_string(user));
      Pages arena(8 * kRecord);
      for (int round = 0; round < 20; round++)
        for (const Kind kind : {kWrite, kRead}) {
          std::vector<OpSpec> specs;
          for (uint64_t number = 0; number < 8; number++)
            specs.push_back(record(kind, fd, number, arena.data + number * kRecord));
          auto batch = submitted(*engine, specs);
          if (round % 5 == 4) engine->cancel(batch);
          CHECK(batch->wait(20s));
          for (size_t i = 0; i < batch->size(); i++) CHECK(batch->op(i).error == 0 || batch->op(i).error == ECANCELED);
        }
      ::close(fd);
    });
  for (std::thread& user : users) user.join();
  ends = true;
  other.join();
  CHECK(engine->close(5s));
}

void the_last_reference_may_be_a_thread() {
  // The caller lets go of engine and batch at once; memory and descriptor stay, as the rule says.
  constexpr uint64_t kRounds = 50;
  static Pages arena(kRounds * kRecord);
  static const int fd = file("abandoned");
  for (uint64_t round = 0; round < kRounds; round++) {
    auto engine = started(2);
    auto batch = submitted(*engine, {record(kWrite, fd, round, arena.data + round * kRecord)});
    batch.reset();
    engine->close(0s);
  }
  std::this_thread::sleep_for(200ms);
}

void errors_and_short_files() {
  auto engine = started(2);
  const int fd = file("short");
  Pages out(kRecord), in(kSlabs * kSlab);
  CHECK(submitted(*engine, {record(kWrite, fd, 0, out.data)})->wait(20s));
  CHECK(ftruncate(fd, static_cast<off_t>(kRecord - 100)) == 0);
  auto batch = submitted(*engine, {record(kRead, fd, 0, in.data), record(kWrite, -1, 0, out.data)});
  CHECK(batch->wait(20s));
  CHECK(batch->op(0).error == ENODATA && batch->op(1).error == EBADF);
  CHECK(engine->close(5s));
  ::close(fd);
}

void neighbours_from_many_threads() {
  auto engine = started(3);
  neighbours_race(*engine, 0);
  CHECK(engine->close(5s));
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 3);
  folder = argv[1];
  sums_agree();
  cancels_race_with_the_work();
  closing_while_submitting();
  files_seem_to_hang_while_they_are_used();
  the_last_reference_may_be_a_thread();
  round_trips_from_many_threads();
  errors_and_short_files();
  neighbours_from_many_threads();
  neighbours_are_read_together();
  device_stage_is_clean(argv[2]);
  range_reads_are_clean(argv[2]);
  std::puts("passed");
  return 0;
}
