// Where the reads of one thread into host memory land.
#pragma once
#include <cstdlib>
#include <memory>

#include "neighbours.h"

namespace kvtier {

// Either right where they belong, or in a bounce buffer, from which the engine copies them as it sums them.
//
// The second is for file systems in memory. There a read is a copy by the kernel, which is slow to write memory that is
// not in the core's caches, and the sum then has to fetch the same bytes again. A buffer that stays in L2 takes both
// costs away for one pass that sums and stores at once. (Processor time of two busy cores of a Xeon of 2019, pieces of
// 256 KiB, four records in flight: records of 4 MiB 299 ms a GB, in place 356, fio without sums 241; of 32 MiB 287, 345
// and 275.) Not so on every processor: kvtier/io/bounce.py measures. And what fails to be read touches no target.
class Landing {
 public:
  // bounce_bytes: the largest run; 0: reads land in place. Throws std::bad_alloc.
  explicit Landing(size_t bounce_bytes);

  // What failed has its error, as of read_run().
  void read(const Run& run);

  // After read(run), where the bytes of its piece are: piece.memory(), or in the bounce buffer until the next read.
  const uint8_t* bytes_of(const Piece& piece, const Run& run) const;

 private:
  struct Free {
    void operator()(uint8_t* pages) const { std::free(pages); }
  };

  std::unique_ptr<uint8_t, Free> bounce_;
  std::unique_ptr<Gaps> gaps_;  // what lies between pieces that land in place
};

}  // namespace kvtier
