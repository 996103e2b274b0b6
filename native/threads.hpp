// Shares a range out over threads in contiguous chunks. Used by module.cpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels.hpp"

namespace raydz {

// Below this a thread costs more than it saves.
constexpr size_t kMinChunk = 16 * kReductionBlock;

// Calls work(begin, end) for chunks that together cover [0, numel) once. Chunks begin at multiples of kReductionBlock,
// so results cannot depend on `num_threads`. `work` must not throw. The caller's thread takes the last chunk.
template <class Work>
void parallel_for(size_t numel, int num_threads, const Work& work) {
  const size_t useful = std::max<size_t>(1, numel / kMinChunk);
  const size_t num_chunks = std::min<size_t>(std::max(num_threads, 1), useful);
  const size_t num_blocks = (numel + kReductionBlock - 1) / kReductionBlock;
  const auto bound = [&](size_t chunk) { return std::min(numel, num_blocks * chunk / num_chunks * kReductionBlock); };
  std::vector<std::thread> threads;
  threads.reserve(num_chunks);
  for (size_t chunk = 0; chunk + 1 < num_chunks; ++chunk) {
    try {
      threads.emplace_back([&work, begin = bound(chunk), end = bound(chunk + 1)] { work(begin, end); });
    } catch (const std::system_error&) {
      work(bound(chunk), bound(chunk + 1));  // the process is out of threads: slower, same result
    }
  }
  work(bound(num_chunks - 1), numel);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace raydz
