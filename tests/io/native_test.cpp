// The engine under the sanitizers, which no Python process could load: many threads, cancels, hung reads, closing.
// Built and run by test_sanitizers.py. Exit status 0 and no word from a sanitizer: passed.
#include <algorithm>
#include <cerrno>
#include <thread>

#include "checksum.h"
#include "crc32.h"
#include "native_support.h"

namespace {

std::shared_ptr<Engine> started(uint32_t threads, bool bounces = false) {
  EngineOptions options{threads, 1024, kPiece, kPiece};
  options.bounce_reads = bounces;
  return Engine::start(options);
}

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

// Sizes around a page, starts within a page and targets of all alignments; what is not the copy's stays.
void copies_are_summed() {
  constexpr size_t kBytes = 3 * kPageBytes, kMargin = 128;
  std::vector<uint8_t> data(kBytes), target(kBytes + 2 * kMargin);
  for (size_t i = 0; i < data.size(); i++) data[i] = static_cast<uint8_t>(i * 59 + i / 256);
  uint64_t seed = 0xFEDCBA9876543210ull;
  for (size_t pairs = 0; pairs <= kBytes / 8 - 1; pairs += pairs < 20 || pairs % 512 > 500 ? 1 : 61)
    for (uint64_t first : {uint64_t{0}, uint64_t{511}, uint64_t{0xFFFFFF00u} + pairs})
      for (int which = 0; which < kInstructionSets; which++) {
        const InstructionSet& set = instruction_sets()[which];
        if (!set.usable) continue;
        const size_t at = kMargin / 2 + seed % 64, from = seed / 64 % 8, bytes = pairs * 8;
        std::fill(target.begin(), target.end(), uint8_t{0xA5});
        CHECK(set.copy_and_sum(target.data() + at, data.data() + from, bytes, seed, first) ==
              instruction_sets()[0].sum(data.data() + from, bytes, seed, first));
        CHECK(std::memcmp(target.data() + at, data.data() + from, bytes) == 0);
        for (size_t i = 0; i < target.size(); i++) CHECK((i >= at && i < at + bytes) || target[i] == 0xA5);
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        seed ^= seed >> 29;
      }
}

void round_trips_from_many_threads(bool bounces) {
  auto engine = started(4, bounces);
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

// Memory goes at once when a cancelled batch is done, so whatever a bounced read still copies there is seen.
void cancels_race_with_bounced_reads() {
  auto engine = started(3, true);
  const int fd = file("bounced");
  CHECK(ftruncate(fd, static_cast<off_t>(8 * kRecord)) == 0);
  for (int round = 0; round < 100; round++) {
    Pages arena(8 * kRecord);
    std::vector<OpSpec> specs;
    for (uint64_t number = 0; number < 8; number++)
      specs.push_back(record(kRead, fd, number, arena.data + number * kRecord));
    auto batch = submitted(*engine, specs);
    if (round % 2) engine->cancel(batch);
    CHECK(batch->wait(20s));
    for (size_t i = 0; i < batch->size(); i++) {
      CHECK(batch->op(i).error == 0 || batch->op(i).error == ECANCELED);
      if (batch->op(i).error == 0) CHECK(arena.data[i * kRecord] == 0 && arena.data[(i + 1) * kRecord - 1] == 0x5A);
    }
  }
  CHECK(engine->close(5s));
  ::close(fd);
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

// What could not be read never reaches memory when it bounces, and pieces before it do.
void pieces_past_the_end_touch_nothing() {
  auto engine = started(1, true);
  const int fd = file("past");
  Pages in(kSlabs * kSlab);
  CHECK(ftruncate(fd, static_cast<off_t>(kPageBytes + kPiece + 100)) == 0);
  auto batch = submitted(*engine, {record(kRead, fd, 0, in.data)});
  CHECK(batch->wait(20s) && batch->op(0).error == ENODATA);
  for (size_t i = 0; i < kSlabs * kSlab; i++) CHECK(in.data[i] == (i < kPiece ? 0 : 0x5A));
  CHECK(engine->close(5s));
  ::close(fd);
}

void errors_and_short_files(bool bounces) {
  auto engine = started(2, bounces);
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

void neighbours_from_many_threads(bool bounces) {
  auto engine = started(3, bounces);
  neighbours_race(*engine, 0);
  CHECK(engine->close(5s));
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 4);
  folder = argv[1];
  sums_agree();
  copies_are_summed();
  cancels_race_with_the_work();
  cancels_race_with_bounced_reads();
  closing_while_submitting();
  the_last_reference_may_be_a_thread();
  pieces_past_the_end_touch_nothing();
  for (bool bounces : {false, true}) {
    round_trips_from_many_threads(bounces);
    errors_and_short_files(bounces);
    neighbours_from_many_threads(bounces);
  }
  neighbours_are_read_together();
  device_stage_is_clean(argv[2]);
  pinned_files_are_copied(argv[2], argv[3]);
  mapped_files_are_read(argv[3]);
  std::puts("passed");
  return 0;
}
