#include "range_plan.h"

#include <algorithm>
#include <utility>

#include "batch.h"
#include "neighbours.h"

namespace kvtier {
namespace {

// Smallest gap in a cached file that is not read: another system call takes as long as copying some KiB.
constexpr uint64_t kCachedGapBytesMin = 4 << 10;

}  // namespace

RangePlan::RangePlan(std::vector<RangeFile> files, std::vector<RangeCopy> copies, uint64_t piece_bytes,
                     uint64_t block_bytes)
    : files_(std::move(files)), copies_(std::move(copies)), piece_bytes_(piece_bytes), block_bytes_(block_bytes) {
  std::vector<Span> spans;
  spans.reserve(copies_.size());
  for (size_t i = 0; i < copies_.size(); i++) {
    RangeCopy& copy = copies_[i];
    if (copy.rows > 1 && copy.source_pitch == copy.row_bytes && copy.target_pitch == copy.row_bytes) {
      copy.row_bytes *= copy.rows;
      copy.rows = 1;
    }
    add_spans(spans, static_cast<uint32_t>(i));
  }
  const auto file_of = [this](const Span& span) { return static_cast<uint32_t>(copies_[span.copy].file); };
  std::sort(spans.begin(), spans.end(), [&](const Span& one, const Span& other) {
    return std::make_pair(file_of(one), one.start) < std::make_pair(file_of(other), other.start);
  });
  for (size_t first = 0; first < spans.size();) {
    const uint32_t file = file_of(spans[first]);
    const uint64_t unit = rounding(file), start = round_down(spans[first].start, unit);
    uint64_t end = spans[first].end;
    size_t last = first + 1;
    for (; last < spans.size() && file_of(spans[last]) == file; last++) {
      if (round_down(spans[last].start, unit) > round_up(end, unit) + gap_bytes_max(file)) break;
      end = std::max(end, spans[last].end);
    }
    // Whole blocks, but not beyond the file, which may be shorter than a copy expects.
    if (files_[file].sums != nullptr)
      end = std::max(end, std::min(round_up(end, unit), static_cast<uint64_t>(files_[file].size)));
    add_run(spans, first, last, start, end);
    first = last;
  }
}

// Rows far apart are read one by one.
void RangePlan::add_spans(std::vector<Span>& spans, uint32_t number) const {
  const RangeCopy& copy = copies_[number];
  const auto longest_gap = static_cast<int64_t>(gap_bytes_max(static_cast<uint32_t>(copy.file)));
  const bool together = copy.rows == 1 || copy.source_pitch - copy.row_bytes <= longest_gap;
  const int64_t rows = together ? copy.rows : 1;
  for (int64_t row = 0; row < copy.rows; row += rows) {
    const uint64_t start = static_cast<uint64_t>(copy.offset + row * copy.source_pitch);
    const uint64_t bytes = static_cast<uint64_t>((rows - 1) * copy.source_pitch + copy.row_bytes);
    spans.push_back({start, start + bytes, number, row, rows});
  }
}

uint64_t RangePlan::rounding(uint32_t file) const { return files_[file].sums != nullptr ? block_bytes_ : kPageBytes; }

// Longest gap within a piece. One that is not read costs nothing, so it may be as long as a piece.
uint64_t RangePlan::gap_bytes_max(uint32_t file) const {
  return skips_gaps(file) ? std::max(kGapBytesMax, piece_bytes_) : kGapBytesMax;
}

// Cuts bytes start ... end of a file into pieces, and gives each its spans.
void RangePlan::add_run(const std::vector<Span>& spans, size_t first, size_t last, uint64_t start, uint64_t end) {
  const uint64_t first_window = start / piece_bytes_;
  const size_t base = pieces_.size();
  for (uint64_t at = start; at < end;) {
    RangePiece piece;
    piece.file = static_cast<uint32_t>(copies_[spans[first].copy].file);
    piece.start = at;
    piece.end = at = std::min(end, round_down(at, piece_bytes_) + piece_bytes_);
    pieces_.push_back(piece);
  }
  const auto each_piece = [&](auto&& visit) {
    for (size_t i = first; i < last; i++)
      for (uint64_t window = spans[i].start / piece_bytes_; window <= (spans[i].end - 1) / piece_bytes_; window++)
        visit(pieces_[base + (window - first_window)], spans[i]);
  };
  each_piece([](RangePiece& piece, const Span&) { piece.n_spans++; });
  for (size_t i = base; i < pieces_.size(); i++) {
    pieces_[i].first_span = spans_.size();
    spans_.resize(spans_.size() + pieces_[i].n_spans);
    pieces_[i].n_spans = 0;
  }
  each_piece([this](RangePiece& piece, const Span& span) { spans_[piece.first_span + piece.n_spans++] = span; });
}

void RangePlan::parts_of(const RangePiece& piece, std::vector<Part>& parts) const {
  parts.clear();
  for (size_t i = 0; i < piece.n_spans; i++) add_parts(piece, spans_[piece.first_span + i], parts);
}

void RangePlan::ranges_of(const RangePiece& piece, const std::vector<Part>& parts,
                          std::vector<PieceRange>& ranges) const {
  ranges.clear();
  if (!skips_gaps(piece.file)) {
    ranges.push_back({0, piece.end - piece.start});
    return;
  }
  for (const Part& part : parts) {
    const bool together = part.rows == 1 || part.source_pitch - part.row_bytes < kCachedGapBytesMin;
    const uint64_t rows = together ? 1 : part.rows;
    const uint64_t bytes = together ? (part.rows - 1) * part.source_pitch + part.row_bytes : part.row_bytes;
    for (uint64_t row = 0; row < rows; row++) {
      const uint64_t from = part.from + row * part.source_pitch;
      ranges.push_back({from, from + bytes});
    }
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const PieceRange& one, const PieceRange& other) { return one.from < other.from; });
  size_t kept = 0;
  for (const PieceRange& range : ranges) {
    if (kept > 0 && range.from < ranges[kept - 1].end + kCachedGapBytesMin)
      ranges[kept - 1].end = std::max(ranges[kept - 1].end, range.end);
    else
      ranges[kept++] = range;
  }
  ranges.resize(kept);
}

// A row that the piece does not hold whole is a part of its own.
void RangePlan::add_parts(const RangePiece& piece, const Span& span, std::vector<Part>& parts) const {
  const RangeCopy& copy = copies_[span.copy];
  const uint64_t bytes = static_cast<uint64_t>(copy.row_bytes), pitch = static_cast<uint64_t>(copy.source_pitch);
  const auto add = [&](uint64_t row, uint64_t from, uint64_t to, uint64_t rows) {
    const uint64_t row_start = span.start + row * pitch;
    const int64_t into = static_cast<int64_t>(from - row_start);
    const int64_t target_offset =
        copy.target_offset + (span.first_row + static_cast<int64_t>(row)) * copy.target_pitch + into;
    parts.push_back({from - piece.start, copy.target, target_offset, rows, to - from, pitch,
                     static_cast<uint64_t>(copy.target_pitch)});
  };
  uint64_t row = 0, behind = static_cast<uint64_t>(span.rows);  // rows row ... behind - 1 touch the piece
  if (span.rows > 1) {
    if (piece.start > span.start) row = (piece.start - span.start) / pitch;
    behind = std::min(behind, (piece.end - span.start - 1) / pitch + 1);
  }
  const auto partial = [&](uint64_t number) {
    const uint64_t start = span.start + number * pitch;
    const uint64_t from = std::max(start, piece.start), to = std::min(start + bytes, piece.end);
    if (from < to) add(number, from, to, 1);
  };
  if (row < behind && span.start + row * pitch < piece.start) partial(row++);
  const bool cut = row < behind && span.start + (behind - 1) * pitch + bytes > piece.end;
  if (cut) behind--;
  if (row < behind) {
    const uint64_t start = span.start + row * pitch;
    add(row, start, start + bytes, behind - row);
  }
  if (cut) partial(behind);
}

}  // namespace kvtier
