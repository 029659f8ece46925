#include "neighbours.h"

#include <limits.h>
#include <sys/uio.h>

#include <algorithm>
#include <iterator>

#include "transfer.h"

namespace kvtier {
namespace {

constexpr size_t kPartsMax = 2 * kRunPiecesMax - 1;
static_assert(kPartsMax <= IOV_MAX, "a run is one preadv");

void read_alone(const Piece& piece, uint8_t* target) {
  const int error = read_at_least(piece.op->spec.fd, target, piece.bytes, piece.bytes, piece.offset()).error;
  if (error != 0) piece.op->fail(error);
}

}  // namespace

bool Run::may_take(const Piece& next, uint64_t bytes_max) const {
  const int64_t gap = next.offset() - end();
  return next.op->spec.fd == fd() && next.op->on_device() == on_device() &&
         gap >= 0 && gap <= static_cast<int64_t>(kGapBytesMax) && pieces.size() < kRunPiecesMax &&
         static_cast<uint64_t>(next.end() - offset()) <= bytes_max;
}

bool Run::is_wanted() const {
  return std::any_of(pieces.begin(), pieces.end(),
                     [](const Piece& piece) { return piece.op->error.load(std::memory_order_relaxed) == 0; });
}

void Run::fail(int code) const {
  for (const Piece& piece : pieces) piece.op->fail(code);
}

void read_run(const Run& run, Gaps& gaps) {
  int64_t come_to = run.offset();
  if (run.pieces.size() > 1) {
    iovec parts[kPartsMax];
    size_t n = 0;
    int64_t at = run.offset();
    for (const Piece& piece : run.pieces) {
      if (piece.offset() > at) parts[n++] = {gaps.bytes, static_cast<size_t>(piece.offset() - at)};
      parts[n++] = {piece.memory(), piece.bytes};
      at = piece.end();
    }
    come_to += read_once(run.fd(), parts, n, run.offset());
  }
  for (const Piece& piece : run.pieces)
    if (piece.end() > come_to) read_alone(piece, piece.memory());
}

void read_run(const Run& run, uint8_t* buffer) {
  int64_t come_to = run.offset();
  if (run.pieces.size() > 1) {
    const iovec whole{buffer, run.bytes()};
    come_to += read_once(run.fd(), &whole, 1, run.offset());
  }
  for (const Piece& piece : run.pieces)
    if (piece.end() > come_to) read_alone(piece, buffer + (piece.offset() - run.offset()));
}

}  // namespace kvtier
