// Gather and scatter between an engine's paged KV in host memory and head-major slabs: one call a chunk, without the
// interpreter lock. The torch reference (kvtier/kernels/paged.py) takes that lock again for every tensor it copies, and
// each time may wait for a busy engine thread.
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

// One K or V tensor of one layer; strides in bytes, rows contiguous. `slab_offset`: offset of its rows in a slab.
struct PagePlane {
  uint64_t base;
  int64_t block_stride;
  int64_t token_stride;
  int64_t head_stride;
  uint64_t row_bytes;
  uint64_t slab_offset;
  int64_t n_blocks;
};

enum Direction : int { kToSlabs = 0, kToPages = 1 };

void copy(Direction direction, uint8_t* page, uint8_t* slab, size_t bytes) {
  std::memcpy(direction == kToSlabs ? slab : page, direction == kToSlabs ? page : slab, bytes);
}

// Copies the rows of one head in one block: `rows` of row_bytes, dense in the slab, `token_stride` apart in the page.
void copy_rows(Direction direction, const PagePlane& plane, uint8_t* page, uint8_t* slab, size_t rows) {
  if (plane.token_stride == static_cast<int64_t>(plane.row_bytes)) {
    copy(direction, page, slab, rows * plane.row_bytes);
    return;
  }
  for (size_t row = 0; row < rows; ++row)
    copy(direction, page + static_cast<int64_t>(row) * plane.token_stride, slab + row * plane.row_bytes,
         plane.row_bytes);
}

}  // namespace

// Copies blocks `first_block`... of `block_ids` between pages and slabs; heads [first_head, first_head + n_heads) of
// the pages are slabs 0... Returns 0, or EINVAL before any copy when a block is not in a plane or a slab is too small.
extern "C" __attribute__((visibility("default"))) int kvtier_copy_pages(
    int direction, const PagePlane* planes, size_t n_planes, const int64_t* block_ids, size_t n_blocks,
    size_t first_block, size_t block_tokens, size_t first_head, size_t n_heads, uint8_t* slabs, size_t slab_bytes) {
  for (size_t p = 0; p < n_planes; ++p) {
    if (planes[p].slab_offset + n_blocks * block_tokens * planes[p].row_bytes > slab_bytes) return EINVAL;
    for (size_t b = 0; b < n_blocks; ++b)
      if (block_ids[b] < 0 || block_ids[b] >= planes[p].n_blocks) return EINVAL;
  }
  for (size_t head = 0; head < n_heads; ++head) {
    for (size_t p = 0; p < n_planes; ++p) {
      const PagePlane& plane = planes[p];
      uint8_t* slab = slabs + head * slab_bytes + plane.slab_offset;
      uint8_t* pages = reinterpret_cast<uint8_t*>(plane.base) +
                       static_cast<int64_t>(first_head + head) * plane.head_stride;
      for (size_t b = first_block; b < n_blocks; ++b)
        copy_rows(static_cast<Direction>(direction), plane, pages + block_ids[b] * plane.block_stride,
                  slab + b * block_tokens * plane.row_bytes, block_tokens);
    }
  }
  return 0;
}
