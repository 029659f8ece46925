#include "landing.h"

#include <cstring>
#include <new>

namespace kvtier {

Landing::Landing(size_t bounce_bytes) {
  if (bounce_bytes == 0) {
    gaps_ = std::make_unique<Gaps>();
    return;
  }
  // Whole pages, for direct reads; touched now, so that no read has to (I7).
  bounce_.reset(static_cast<uint8_t*>(std::aligned_alloc(kPageBytes, bounce_bytes)));
  if (!bounce_) throw std::bad_alloc();
  std::memset(bounce_.get(), 0, bounce_bytes);
}

void Landing::read(const Run& run) {
  if (bounce_)
    read_run(run, bounce_.get());
  else
    read_run(run, *gaps_);
}

const uint8_t* Landing::bytes_of(const Piece& piece, const Run& run) const {
  return bounce_ ? bounce_.get() + (piece.offset() - run.offset()) : piece.memory();
}

}  // namespace kvtier
