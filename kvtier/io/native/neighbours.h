// Runs: pieces that are adjacent in a file, read with one system call.
//
// Records smaller than a piece (small models, many ranks, codecs that compress) would else cost a system call each, on
// a network file system a request each. Gaps between them (header pages, heads of other ranks) are read and discarded.
// 512 records of 64 KiB, direct, 16 threads, two busy cores, a virtual disk: 3.5 GB/s, one by one 1.4; with 1 ms added
// to each call 2.5 and 0.7; records of 256 KiB: 3.8 and 3.7. tmpfs: no difference.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "batch.h"

namespace kvtier {

constexpr uint64_t kGapBytesMax = 64 << 10;
constexpr size_t kRunPiecesMax = 256;  // with a gap before each but the first, half of preadv's limit

// Target of one thread's gaps. Direct reads need whole pages.
struct alignas(kPageBytes) Gaps {
  uint8_t bytes[kGapBytesMax];
};

// Pieces that one thread moves at a time: of one file, in the order of their offsets, without overlap, of one or more
// batches. A write is a run of its own.
struct Run {
  std::vector<Piece> pieces;

  int64_t offset() const { return pieces.front().offset(); }
  int64_t end() const { return pieces.back().end(); }
  uint64_t bytes() const { return static_cast<uint64_t>(end() - offset()); }  // with gaps
  int fd() const { return pieces.front().op->spec.fd; }
  int kind() const { return pieces.front().op->spec.kind; }
  bool on_device() const { return pieces.front().op->on_device(); }

  // True if read `next` fits behind the others, all together at most `bytes_max` of the file.
  bool may_take(const Piece& next, uint64_t bytes_max) const;

  // False when all its operations have failed: it need not be read.
  bool is_wanted() const;

  void fail(int code) const;
};

// Both read a run with one call, and pieces that it did not fill one by one, so that an error, or the end of the file,
// fails only the operations concerned.

// Reads into the memory of the operations.
void read_run(const Run& run, Gaps& gaps);

// Reads into a buffer of run.bytes(), at the pieces' distances in the file.
void read_run(const Run& run, uint8_t* buffer);

}  // namespace kvtier
