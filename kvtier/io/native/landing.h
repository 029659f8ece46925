// Where the reads of one thread into host memory come from and land.
#pragma once
#include <cstdlib>
#include <memory>
#include <vector>

#include "bus_guard.h"
#include "mapped.h"
#include "neighbours.h"

namespace kvtier {

// Three ways: right where they belong; or by way of a bounce buffer, from which the engine copies them as it sums them;
// or not at all, where the engine copies and sums what is mapped.
//
// The last two are for file systems in memory. There a read is a copy by the kernel, which is slow to write memory that
// is not in the core's caches, and the sum then has to fetch the same bytes again. A buffer that stays in L2 takes both
// costs away for one pass that sums and stores at once. (Processor time of two busy cores of a Xeon of 2019, pieces of
// 256 KiB, four records in flight: records of 4 MiB 299 ms a GB, in place 356, fio without sums 241; of 32 MiB 287, 345
// and 275.) Not so on every processor: kvtier/io/memory_reads.py measures. And what fails to be read touches no target.
class Landing {
 public:
  // bounce_bytes: the largest run; 0: reads land in place. mappings: null, or what is tried first. Throws
  // std::bad_alloc.
  Landing(size_t bounce_bytes, Mappings* mappings);

  // What failed has its error, as of read_run().
  void read(const Run& run);

  // After read(run), for each piece without an error: take(piece, bytes), its bytes being in piece.memory() or
  // elsewhere, from where they are to be copied there. What cannot be taken to the end has its error.
  template <typename Take>
  void take(const Run& run, Take take) {
    for (size_t i = 0; i < run.pieces.size(); i++) {
      const Piece& piece = run.pieces[i];
      if (piece.op->error.load(std::memory_order_relaxed) != 0) continue;
      const auto copy = [&] { take(piece, bytes_of(i, run)); };
      if (!mapping_) {
        copy();
      } else if (const int error = guard_->run(mapped_[i], piece.bytes, copy)) {
        piece.op->fail(error);
      }
    }
    mapping_.reset();
  }

 private:
  bool is_mapped(const Run& run);
  const uint8_t* bytes_of(size_t i, const Run& run) const;

  struct Free {
    void operator()(uint8_t* pages) const { std::free(pages); }
  };

  std::unique_ptr<uint8_t, Free> bounce_;
  std::unique_ptr<Gaps> gaps_;  // what lies between pieces that land in place
  Mappings* const mappings_;
  std::shared_ptr<const Mapping> mapping_;  // of the run, between read and take
  std::vector<const uint8_t*> mapped_;      // its pieces
  std::vector<unsigned char> pages_;        // scratch
  std::unique_ptr<BusGuard> guard_;         // made by the thread itself
};

}  // namespace kvtier
