// Where packed weights and what a step works in lie: few large pieces that the system may back with huge pages. A step reads
// every weight once, and a page of 4 KB is so soon read that looking up the next one would cost as much as reading it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ramet {

class Chunk {
 public:
  static constexpr int64_t kHugePage = 2 << 20;

  explicit Chunk(int64_t bytes) : bytes_((bytes + kHugePage - 1) / kHugePage * kHugePage) {
    data_ = static_cast<uint8_t*>(std::aligned_alloc(kHugePage, bytes_));
    if (!data_) throw std::bad_alloc();
#if defined(__linux__)
    madvise(data_, bytes_, MADV_HUGEPAGE);  // only a wish: without huge pages it works as well
#endif
  }
  ~Chunk() { std::free(data_); }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  // `bytes` aligned to a cache line, or null if they do not fit any more.
  uint8_t* take(int64_t bytes) {
    const int64_t begin = (used_ + 63) / 64 * 64;
    if (begin + bytes > bytes_) return nullptr;
    used_ = begin + bytes;
    return data_ + begin;
  }

 private:
  uint8_t* data_;
  int64_t bytes_;
  int64_t used_ = 0;
};

// Gives out memory that lives as long as the weights in it.
class WeightMemory {
 public:
  static constexpr int64_t kChunk = 16 << 20;

  std::pair<std::shared_ptr<Chunk>, uint8_t*> take(int64_t bytes) {
    if (bytes * 4 > kChunk) {  // a large weight has a chunk of its own
      auto chunk = std::make_shared<Chunk>(bytes);
      uint8_t* data = chunk->take(bytes);
      return {std::move(chunk), data};
    }
    uint8_t* data = open_ ? open_->take(bytes) : nullptr;
    if (!data) {
      open_ = std::make_shared<Chunk>(kChunk);
      data = open_->take(bytes);
    }
    return {open_, data};
  }

 private:
  std::shared_ptr<Chunk> open_;
};

}  // namespace ramet
