// Plan of a range read: pieces of files that are read at once, and the bytes that each gives to targets. Does no I/O.
//
// Pieces are aligned windows of a file, so that each byte is read once, at offsets that direct I/O takes, wherever
// ranges begin. Ranges at most 64 KiB apart are read together. In files that are in the page cache and get no checksums,
// gaps of 4 KiB or more within a piece are not read: there a small read costs little more than copying its bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtier {

// Layout of the C interface, as of kvtier/weights/copies.py: `rows` rows of `row_bytes` bytes, `source_pitch` apart in
// the file and `target_pitch` apart in the target.
struct RangeCopy {
  int64_t file, offset, rows, row_bytes, source_pitch, target, target_offset, target_pitch;
};
static_assert(sizeof(RangeCopy) == 64, "the layout is part of the C interface");

struct RangeFile {
  int64_t fd;
  int64_t size;
  uint64_t* sums;  // receives the checksum of each block that a copy touches; null: none is computed
  const uint8_t* not_summed;  // of each block, not 0: its checksum is not computed; null: all are
  uint64_t is_cached;         // not 0: the file is in the page cache, and read through it
};
static_assert(sizeof(RangeFile) == 40, "the layout is part of the C interface");

// Part of a piece that goes to one target. The offset is within the piece. One row: its pitches are unused.
struct Part {
  uint64_t from;
  int64_t target, target_offset;
  uint64_t rows, row_bytes, source_pitch, target_pitch;

  uint64_t bytes() const { return rows * row_bytes; }
};

// Bytes start ... end of a file. `start` is whole pages, and less than `piece_bytes` before `end`.
struct RangePiece {
  uint32_t file = 0;
  uint64_t start = 0, end = 0;
  size_t first_span = 0, n_spans = 0;
};

// Bytes of a piece, as offsets from its start.
struct PieceRange {
  uint64_t from, end;
};

class RangePlan {
 public:
  // Copies lie within their targets, and their ends do not overflow. `piece_bytes`: a multiple of `block_bytes`, which
  // is a multiple of a page. In files with sums, whole blocks are read.
  RangePlan(std::vector<RangeFile> files, std::vector<RangeCopy> copies, uint64_t piece_bytes, uint64_t block_bytes);

  const std::vector<RangePiece>& pieces() const { return pieces_; }
  const std::vector<RangeFile>& files() const { return files_; }

  // Replaces `parts` by those of a piece.
  void parts_of(const RangePiece& piece, std::vector<Part>& parts) const;

  // Replaces `ranges` by the bytes of a piece that must be read, in order. `parts`: those of the piece.
  void ranges_of(const RangePiece& piece, const std::vector<Part>& parts, std::vector<PieceRange>& ranges) const;

 private:
  // Rows of a copy, and the bytes of the file from the first to the end of the last.
  struct Span {
    uint64_t start, end;
    uint32_t copy;
    int64_t first_row, rows;
  };

  void add_spans(std::vector<Span>& spans, uint32_t copy) const;
  void add_run(const std::vector<Span>& spans, size_t first, size_t last, uint64_t start, uint64_t end);
  uint64_t rounding(uint32_t file) const;
  bool skips_gaps(uint32_t file) const { return files_[file].is_cached != 0 && files_[file].sums == nullptr; }
  uint64_t gap_bytes_max(uint32_t file) const;
  void add_parts(const RangePiece& piece, const Span& span, std::vector<Part>& parts) const;

  const std::vector<RangeFile> files_;
  std::vector<RangeCopy> copies_;
  const uint64_t piece_bytes_, block_bytes_;
  std::vector<RangePiece> pieces_;
  std::vector<Span> spans_;  // of the pieces, one after the other
};

}  // namespace kvtier
