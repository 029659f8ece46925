// Reads of neighbours: which pieces are taken together, and many threads that take from many batches.
#include <algorithm>
#include <cerrno>
#include <thread>

#include "native_support.h"
#include "neighbours.h"
#include "transfer.h"

namespace {

constexpr uint64_t kSmall = 2 * kPageBytes;             // slabs of a small record
constexpr uint64_t kSmallRecord = kPageBytes + kSmall;  // with the header page before them
constexpr uint64_t kMany = 64;

OpSpec pages_at(int fd, int64_t offset, uint64_t bytes, uint32_t flags = 0) {
  OpSpec spec{};
  spec.kind = kRead;
  spec.fd = fd;
  spec.offset = offset;
  spec.address = kPageBytes;
  spec.slab_bytes = bytes;
  spec.n_slabs = 1;
  spec.flags = flags;
  return spec;
}

OpSpec small_record(int fd, uint64_t number, uint8_t* memory, uint32_t flags) {
  OpSpec spec = pages_at(fd, static_cast<int64_t>(number * kSmallRecord + kPageBytes), kSmall, flags);
  spec.address = reinterpret_cast<uint64_t>(memory + number * kSmall);
  return spec;
}

uint8_t byte_of(uint64_t number, size_t i) { return static_cast<uint8_t>(i / 64 * 5 + number * 3 + 1); }

int small_records(const std::string& name) {
  const int fd = file(name);
  std::vector<uint8_t> slabs(kSmall);
  for (uint64_t number = 0; number < kMany; number++) {
    for (size_t i = 0; i < kSmall; i++) slabs[i] = byte_of(number, i);
    CHECK(pwrite(fd, slabs.data(), kSmall, static_cast<off_t>(number * kSmallRecord + kPageBytes)) ==
          static_cast<ssize_t>(kSmall));
  }
  return fd;
}

bool landed(const uint8_t* memory, uint64_t number) {
  for (size_t i = 0; i < kSmall; i++)
    if (memory[number * kSmall + i] != byte_of(number, i)) return false;
  return true;
}

// What a run of one piece, 4 pages from page 100 on, does with another piece.
bool takes(const OpSpec& other, uint64_t bytes_max = 1 << 20) {
  Op first, next;
  first.spec = pages_at(3, 100 * kPageBytes, 4 * kPageBytes);
  next.spec = other;
  const Run run{{{nullptr, &first, 0, 4 * kPageBytes}}};
  return run.may_take({nullptr, &next, 0, other.slab_bytes}, bytes_max);
}

void only_neighbours_are_taken() {
  CHECK(takes(pages_at(3, 104 * kPageBytes, kPageBytes)));
  CHECK(takes(pages_at(3, 105 * kPageBytes, kPageBytes)));
  CHECK(takes(pages_at(3, 104 * kPageBytes + kGapBytesMax, kPageBytes)));
  CHECK(!takes(pages_at(3, 105 * kPageBytes + kGapBytesMax, kPageBytes)));
  CHECK(!takes(pages_at(3, 103 * kPageBytes, kPageBytes)));  // the last page twice
  CHECK(!takes(pages_at(3, 99 * kPageBytes, kPageBytes)));   // before it
  CHECK(!takes(pages_at(4, 104 * kPageBytes, kPageBytes)));  // of another file
  CHECK(!takes(pages_at(3, 104 * kPageBytes, kPageBytes, kOnDevice)));
  CHECK(takes(pages_at(3, 104 * kPageBytes, kPageBytes, kVerify)));
  CHECK(takes(pages_at(3, 105 * kPageBytes, 3 * kPageBytes), 8 * kPageBytes));
  CHECK(!takes(pages_at(3, 105 * kPageBytes, 3 * kPageBytes), 7 * kPageBytes));  // the gap counts
}

void a_run_has_a_largest_number_of_pieces() {
  Op op;
  op.spec = pages_at(3, 0, kPageBytes);
  Run run{{{nullptr, &op, 0, kPageBytes}}};
  std::vector<Op> others(kRunPiecesMax);
  size_t taken = 1;
  for (Op& other : others) {
    other.spec = pages_at(3, run.end() + static_cast<int64_t>(kPageBytes), kPageBytes);
    const Piece next{nullptr, &other, 0, kPageBytes};
    if (!run.may_take(next, uint64_t{1} << 30)) break;
    run.pieces.push_back(next);
    taken++;
  }
  CHECK(taken == kRunPiecesMax);
}

void one_batch_is_few_reads() {
  const int fd = small_records("one");
  auto engine = Engine::start({1, 1024, kMany * kSmallRecord, kPiece});
  Pages memory(kMany * kSmall);
  std::vector<OpSpec> specs;
  for (uint64_t number = 0; number < kMany; number++) specs.push_back(small_record(fd, number, memory.data, 0));
  const uint64_t before = reads_issued();
  auto batch = submitted(*engine, specs);
  CHECK(batch->wait(20s) && reads_issued() == before + 1);
  for (uint64_t number = 0; number < kMany; number++)
    CHECK(batch->op(number).error == 0 && landed(memory.data, number));
  CHECK(engine->close(5s));
  ::close(fd);
}

}  // namespace

void neighbours_are_read_together() {
  only_neighbours_are_taken();
  a_run_has_a_largest_number_of_pieces();
  one_batch_is_few_reads();
}

// `flags`: kOnDevice with a `device` engine. Batches of one read each or of several, cancelled now and then; each
// user's memory goes at once when its batches are done, so whatever still lands there is seen.
void neighbours_race(Engine& engine, uint32_t flags) {
  const int fd = small_records("race");
  std::vector<std::thread> users;
  for (uint64_t user = 0; user < 3; user++)
    users.emplace_back([&engine, fd, user, flags] {
      for (uint64_t round = 0; round < 12; round++) {
        Pages memory(kMany * kSmall);
        std::vector<std::shared_ptr<Batch>> batches;
        const uint64_t of_batch = 1 + (round + user) % 5;
        for (uint64_t number = 0; number < kMany; number += of_batch) {
          std::vector<OpSpec> specs;
          for (uint64_t i = number; i < std::min(kMany, number + of_batch); i++)
            specs.push_back(small_record(fd, i, memory.data, flags));
          batches.push_back(submitted(engine, specs));
        }
        for (size_t i = round % 7; round % 3 == 0 && i < batches.size(); i += 7) engine.cancel(batches[i]);
        uint64_t number = 0;
        for (auto& batch : batches) {
          CHECK(batch->wait(60s));
          for (size_t i = 0; i < batch->size(); i++, number++)
            CHECK(batch->op(i).error == 0 ? landed(memory.data, number) : batch->op(i).error == ECANCELED);
        }
      }
    });
  for (std::thread& user : users) user.join();
  ::close(fd);
}
