// Section "launch": what a kernel node of a captured graph costs when it does nothing, as chains of
// 100 and 1,500 nodes, for a single-warp node and for one that fills the device.
#pragma once

#include "tests/device/term_order/harness.cuh"

namespace lode::term_order {

// Counts its executions in one lane, so that "every node ran" can be checked; `count` null: does
// nothing at all.
static __global__ void NodeKernel(uint32_t* count) {
  if (count != nullptr && blockIdx.x == 0 && threadIdx.x == 0) ++*count;
}

struct Graph {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ~Graph() {
    if (exec != nullptr) cudaGraphExecDestroy(exec);
    if (graph != nullptr) cudaGraphDestroy(graph);
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
};
inline bool Capture(Section& section, Graph& g, int nodes, int blocks, int threads,
                    uint32_t* count) {
  LODE_TRY(section, cudaStreamCreateWithFlags(&g.stream, cudaStreamNonBlocking), false);
  LODE_TRY(section, cudaStreamBeginCapture(g.stream, cudaStreamCaptureModeThreadLocal), false);
  for (int i = 0; i < nodes; ++i) NodeKernel<<<blocks, threads, 0, g.stream>>>(count);
  LODE_TRY(section, cudaStreamEndCapture(g.stream, &g.graph), false);
  LODE_TRY(section, cudaGetLastError(), false);
  LODE_TRY(section, cudaGraphInstantiate(&g.exec, g.graph, 0), false);
  LODE_TRY(section, cudaGraphUpload(g.exec, g.stream), false);
  return section.Ok(cudaStreamSynchronize(g.stream), "upload of the graph", __LINE__);
}
inline double GraphMs(Section& section, Graph& g) {
  cudaEvent_t start = nullptr, stop = nullptr;
  LODE_TRY(section, cudaEventCreate(&start), -1);
  LODE_TRY(section, cudaEventCreate(&stop), -1);
  std::vector<float> times;
  for (int i = 0; i < kWarmups + 2 * kRepeats; ++i) {
    LODE_TRY(section, cudaEventRecord(start, g.stream), -1);
    LODE_TRY(section, cudaGraphLaunch(g.exec, g.stream), -1);
    LODE_TRY(section, cudaEventRecord(stop, g.stream), -1);
    LODE_TRY(section, cudaEventSynchronize(stop), -1);
    float ms = 0;
    LODE_TRY(section, cudaEventElapsedTime(&ms, start, stop), -1);
    if (i >= kWarmups) times.push_back(ms);
  }
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

inline void RunLaunch(Section& section, bool measure) {
  cudaDeviceProp prop;
  LODE_TRY(section, cudaGetDeviceProperties(&prop, 0), );
  DeviceBuffer<uint32_t> count;
  LODE_TRY(section, count.Allocate(1), );
  NodeKernel<<<1, 32>>>(
      nullptr);  // loads the kernel: a lazily loaded one must not meet a capture first
  LODE_TRY(section, cudaGetLastError(), );
  LODE_TRY(section, cudaDeviceSynchronize(), );
  struct Shape {
    const char* name;
    int blocks, threads;
  };
  for (const Shape& shape :
       {Shape{"1 block x 32", 1, 32}, Shape{"all SMs x 256", prop.multiProcessorCount, 256}}) {
    double ms[2] = {0, 0};
    const int nodes[2] = {100, 1500};
    for (int i = 0; i < 2; ++i) {
      {
        Graph counted;
        LODE_TRY(section, cudaMemset(count.get(), 0, 4), );
        if (!Capture(section, counted, nodes[i], shape.blocks, shape.threads, count.get())) return;
        LODE_TRY(section, cudaGraphLaunch(counted.exec, counted.stream), );
        LODE_TRY(section, cudaStreamSynchronize(counted.stream), );
        uint32_t seen = 0;
        LODE_TRY(section, cudaMemcpy(&seen, count.get(), 4, cudaMemcpyDeviceToHost), );
        section.Expect(seen == static_cast<uint32_t>(nodes[i]),
                       "every node of the graph ran once, in order");
      }
      if (!measure) continue;
      Graph empty;
      if (!Capture(section, empty, nodes[i], shape.blocks, shape.threads, nullptr)) return;
      ms[i] = GraphMs(section, empty);
      if (ms[i] <= 0) return;
      char key[80];
      std::snprintf(key, sizeof key, "%s: %d nodes, us per node", shape.name, nodes[i]);
      section.Value(key, 1e3 * ms[i] / nodes[i]);
    }
    if (!measure) continue;
    const double slope = 1e3 * (ms[1] - ms[0]) / (nodes[1] - nodes[0]);
    section.Value(std::string(shape.name) + ": us per further node", slope);
    section.Line(
        "empty graph, %-14s 100 nodes %.2f us per node, 1500 nodes %.2f us per node, slope %.2f us",
        shape.name, 10 * ms[0], 1e3 * ms[1] / nodes[1], slope);
  }
}

}  // namespace lode::term_order
