#include "landing.h"

#include <cstring>
#include <new>

namespace kvtier {

Landing::Landing(size_t bounce_bytes, Mappings* mappings) : mappings_(mappings) {
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
  if (is_mapped(run)) return;
  if (bounce_)
    read_run(run, bounce_.get());
  else
    read_run(run, *gaps_);
}

// All of it or nothing: a read that fails in part is for read_run() to sort out.
bool Landing::is_mapped(const Run& run) {
  if (mappings_ == nullptr) return false;
  std::shared_ptr<const Mapping> mapping = mappings_->of(run.pieces.front().op->spec.fd, run.end());
  if (!mapping) return false;
  mapped_.clear();
  for (const Piece& piece : run.pieces) {
    mapped_.push_back(mapping->find(piece.offset(), piece.bytes, pages_));
    if (mapped_.back() == nullptr) return false;
  }
  if (!guard_) guard_ = std::make_unique<BusGuard>();
  mapping_ = std::move(mapping);
  return true;
}

const uint8_t* Landing::bytes_of(size_t i, const Run& run) const {
  if (mapping_) return mapped_[i];
  const Piece& piece = run.pieces[i];
  return bounce_ ? bounce_.get() + (piece.offset() - run.offset()) : piece.memory();
}

}  // namespace kvtier
