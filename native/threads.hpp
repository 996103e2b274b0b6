// Shares ranges out over a pool of threads in contiguous chunks. Used by module.cpp and optimizers.cpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "kernels.hpp"

namespace raydz {

// Below this a thread costs more than it saves.
constexpr size_t kMinChunk = 16 * kReductionBlock;

// Chunks that each thread gets to take: with more than one a core that is busy elsewhere holds up less.
constexpr size_t kChunksEach = 4;

// A call of work(context, chunk); see pool.cpp.
using ChunkWork = void (*)(const void* context, size_t chunk);

// Calls work for each chunk in [0, num_chunks) once, on at most `num_threads`, the caller's one of them, and returns
// when all are done. The pool has as many threads as the largest call so far could use; they are kept. Safe to call
// from several threads at a time and after a fork; if the process is out of threads it is slower, with the same result.
void run_chunks(size_t num_chunks, size_t num_threads, ChunkWork work, const void* context);

// Threads of the pool.
size_t num_pool_threads();

// Runs the pool's threads, those of now and later ones, on these processors alone; callers leave all chunks to them
// then. Returns false where the system refuses.
bool set_pool_affinity(const std::vector<int>& processors);

// Calls work(range, begin, end) for chunks that together cover [0, sizes[range]) of every range once. Chunks begin at
// multiples of kReductionBlock, so results cannot depend on `num_threads`. `work` must not throw.
template <class Work>
void parallel_for_all(const std::vector<size_t>& sizes, int num_threads, const Work& work) {
  std::vector<size_t> first_blocks = {0};  // of each range, as if all lay behind each other
  size_t total = 0;
  for (const size_t size : sizes) {
    first_blocks.push_back(first_blocks.back() + (size + kReductionBlock - 1) / kReductionBlock);
    total += size;
  }
  const size_t useful = std::max<size_t>(1, total / kMinChunk);
  const size_t workers = std::min<size_t>(std::max(num_threads, 1), useful);
  const size_t num_chunks = workers == 1 ? 1 : std::min(useful, workers * kChunksEach);
  const auto chunk_work = [&](size_t chunk) {
    const size_t stop = first_blocks.back() * (chunk + 1) / num_chunks;
    size_t block = first_blocks.back() * chunk / num_chunks;
    size_t range = std::upper_bound(first_blocks.begin(), first_blocks.end(), block) - first_blocks.begin() - 1;
    for (; block < stop; block = first_blocks[++range]) {
      const size_t end = std::min(first_blocks[range + 1], stop) - first_blocks[range];
      work(range, (block - first_blocks[range]) * kReductionBlock, std::min(sizes[range], end * kReductionBlock));
    }
  };
  if (num_chunks == 1) return chunk_work(0);
  run_chunks(
      num_chunks, workers,
      [](const void* context, size_t chunk) { (*static_cast<decltype(&chunk_work)>(context))(chunk); }, &chunk_work);
}

// The same for one range: work(begin, end).
template <class Work>
void parallel_for(size_t numel, int num_threads, const Work& work) {
  parallel_for_all({numel}, num_threads, [&](size_t, size_t begin, size_t end) { work(begin, end); });
}

}  // namespace raydz
