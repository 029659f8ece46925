// Runs: pieces that are adjacent in a file, read with one system call.
//
// Records smaller than a piece (small models, many ranks, codecs that compress) would else cost a system call each, and
// on a network file system a request each. What lies between them (a record's header page, heads of other ranks) is
// read and thrown away. 512 records of 64 KiB, direct, 16 threads, two busy cores: 3.5 GB/s, one by one 1.4 (a virtual
// disk); 2.5 and 0.7 with 1 ms added to each call; 256 KiB: 3.8 and 3.7. tmpfs shows no difference.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "batch.h"

namespace kvtier {

constexpr uint64_t kGapBytesMax = 64 << 10;
constexpr size_t kRunPiecesMax = 256;  // with a gap before each but the first, half of what preadv takes

// Where one thread's gaps land. Direct reads need whole pages.
struct alignas(kPageBytes) Gaps {
  uint8_t bytes[kGapBytesMax];
};

// What one thread moves at a time: pieces of one file in the order in which they lie there, none over another, of one
// batch or several. A write is alone.
struct Run {
  std::vector<Piece> pieces;

  int64_t offset() const { return pieces.front().offset(); }
  int64_t end() const { return pieces.back().end(); }
  uint64_t bytes() const { return static_cast<uint64_t>(end() - offset()); }  // gaps too
  int fd() const { return pieces.front().op->spec.fd; }
  int kind() const { return pieces.front().op->spec.kind; }
  bool is_pinned() const { return pieces.front().op->pinned != nullptr; }
  bool on_device() const { return pieces.front().op->on_device(); }

  // Of reads: whether `next` may be read with the others, all together at most `bytes_max` of the file.
  bool may_take(const Piece& next, uint64_t bytes_max) const;

  // False when every operation of it has failed: the rest of it is not tried.
  bool is_wanted() const;

  void fail(int code) const;
};

// One read for all of a run. What that did not bring is read again piece by piece, so an error, or the end of the file,
// is an error of those operations alone whose bytes it concerns.

// Into the memory of the operations.
void read_run(const Run& run, Gaps& gaps);

// Into a buffer with room for run.bytes(), each piece as far from its start as in the file.
void read_run(const Run& run, uint8_t* buffer);

}  // namespace kvtier
