// Shares a range out over a pool of threads in contiguous chunks. Used by module.cpp and optimizers.cpp.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels.hpp"

namespace raydz {

// Below this a thread costs more than it saves.
constexpr size_t kMinChunk = 16 * kReductionBlock;

// A call of work(context, chunk); see pool.cpp.
using ChunkWork = void (*)(const void* context, size_t chunk);

// Calls work for each chunk in [0, num_chunks) once, the caller's thread taking its share, and returns when all are
// done. The pool has as many threads as the largest call so far could use; they are kept. Safe to call from several
// threads at a time and after a fork; if the process is out of threads it is slower, with the same result.
void run_chunks(size_t num_chunks, ChunkWork work, const void* context);

// Threads of the pool.
size_t num_pool_threads();

// Calls work(begin, end) for chunks that together cover [0, numel) once. Chunks begin at multiples of kReductionBlock,
// so results cannot depend on `num_threads`. `work` must not throw.
template <class Work>
void parallel_for(size_t numel, int num_threads, const Work& work) {
  const size_t useful = std::max<size_t>(1, numel / kMinChunk);
  const size_t num_chunks = std::min<size_t>(std::max(num_threads, 1), useful);
  const size_t num_blocks = (numel + kReductionBlock - 1) / kReductionBlock;
  const auto chunk_work = [&](size_t chunk) {
    const auto bound = [&](size_t at) { return std::min(numel, num_blocks * at / num_chunks * kReductionBlock); };
    work(bound(chunk), chunk + 1 == num_chunks ? numel : bound(chunk + 1));
  };
  if (num_chunks == 1) return chunk_work(0);
  run_chunks(
      num_chunks, [](const void* context, size_t chunk) { (*static_cast<decltype(&chunk_work)>(context))(chunk); },
      &chunk_work);
}

}  // namespace raydz
