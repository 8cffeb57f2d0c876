// Section "deltanet": the canonical step form against a scalar host on 16 tokens (outputs and final
// state, bit for bit), then milliseconds per layer for 4,096 tokens of the canonical and the free
// order.
#pragma once

#include "tests/device/term_order/deltanet.cuh"
#include "tests/device/term_order/harness.cuh"

namespace lode::term_order {

inline constexpr uint32_t kTokensChecked = 16, kTokensMeasured = 4096;

struct DeltaData {
  std::vector<float> q, k, v, g, beta, state;
};
// kn and qn as the model feeds them: unit length, q also divided by sqrt(128) (any rounding will
// do: they are inputs here).
inline DeltaData RandomDelta(uint32_t tokens) {
  DeltaData data;
  const auto fill = [](std::vector<float>& out, size_t n, uint32_t seed, float scale,
                       float offset) {
    out.resize(n);
    for (size_t i = 0; i < n; ++i) out[i] = offset + scale * RandomUnit(seed, i);
  };
  fill(data.q, static_cast<size_t>(tokens) * kQkHeads * kKeys, 71, 0.0135f, 0);
  fill(data.k, static_cast<size_t>(tokens) * kQkHeads * kKeys, 72, 0.153f, 0);
  fill(data.v, static_cast<size_t>(tokens) * kHeads * kValues, 73, 2.0f, 0);
  fill(data.g, static_cast<size_t>(tokens) * kHeads, 74, 0.1f, 0.9f);
  fill(data.beta, static_cast<size_t>(tokens) * kHeads, 75, 0.5f, 0.5f);
  fill(data.state, static_cast<size_t>(kHeads) * kKeys * kValues, 76, 0.3f, 0);
  return data;
}

inline float HostColumnSum(const float* x, const float* column) {
  float p[canonical::kPartials] = {};
  for (int k = 0; k < kKeys; ++k) {
    p[k % canonical::kPartials] =
        canonical::Fma(x[k], column[k * kValues], p[k % canonical::kPartials]);
  }
  return canonical::JoinPartials(p);
}
// Advances data.state over `tokens` tokens, as the arithmetic document words it.
inline std::vector<float> HostDelta(DeltaData& data, uint32_t tokens) {
  using namespace canonical;
  std::vector<float> o(static_cast<size_t>(tokens) * kHeads * kValues);
  for (uint32_t token = 0; token < tokens; ++token) {
    for (int head = 0; head < kHeads; ++head) {
      const float* kn = &data.k[(static_cast<size_t>(token) * kQkHeads + head % kQkHeads) * kKeys];
      const float* qn = &data.q[(static_cast<size_t>(token) * kQkHeads + head % kQkHeads) * kKeys];
      const size_t at = static_cast<size_t>(token) * kHeads + head;
      for (int v = 0; v < kValues; ++v) {
        float* s = &data.state[static_cast<size_t>(head) * kKeys * kValues + v];
        for (int k = 0; k < kKeys; ++k) s[k * kValues] = Mul(data.g[at], s[k * kValues]);
        const float delta = Mul(data.beta[at], Sub(data.v[at * kValues + v], HostColumnSum(kn, s)));
        for (int k = 0; k < kKeys; ++k) s[k * kValues] = Fma(kn[k], delta, s[k * kValues]);
        o[at * kValues + v] = HostColumnSum(qn, s);
      }
    }
  }
  return o;
}

struct DeltaContext {
  DeviceBuffer<float> q, k, v, g, beta, state, o;
  DeltaArgs Args(uint32_t tokens) {
    return {q.get(), k.get(), v.get(), g.get(), beta.get(), state.get(), o.get(), tokens};
  }
};
template <bool kCanonical>
void LaunchDelta(DeltaContext& c, uint32_t tokens) {
  DeltaKernel<kCanonical><<<kDeltaBlocks, kDeltaThreads, kDeltaShared>>>(c.Args(tokens));
}

struct DeltaMismatch {
  size_t different = 0, unwritten = 0;
  double largest = 0;
};
inline DeltaMismatch CompareHost(const std::vector<float>& device, const std::vector<float>& host) {
  DeltaMismatch m;
  for (size_t i = 0; i < host.size(); ++i) {
    m.different += canonical::BitsOf(device[i]) != canonical::BitsOf(host[i]);
    m.unwritten += canonical::BitsOf(device[i]) == 0xffffffffu;
    m.largest = std::max(m.largest, std::fabs(static_cast<double>(device[i]) - host[i]));
  }
  return m;
}

// Canonical: every bit. Free: close (128-term sums of values of order 1), and different somewhere,
// or the check sees no order.
template <bool kCanonical>
bool CheckDelta(Section& section, DeltaContext& c, const DeltaData& start, const DeltaData& end,
                const std::vector<float>& o) {
  LODE_TRY(
      section,
      cudaMemcpy(c.state.get(), start.state.data(), start.state.size() * 4, cudaMemcpyHostToDevice),
      false);
  LODE_TRY(section, c.o.Poison(), false);
  LaunchDelta<kCanonical>(c, kTokensChecked);
  LODE_TRY(section, cudaGetLastError(), false);
  LODE_TRY(section, cudaDeviceSynchronize(), false);
  std::vector<float> device_o, device_state;
  LODE_TRY(section, c.o.Download(device_o, 0, o.size()), false);
  LODE_TRY(section, c.state.Download(device_state, 0, end.state.size()), false);
  const DeltaMismatch mo = CompareHost(device_o, o), ms = CompareHost(device_state, end.state);
  char text[200];
  std::snprintf(
      text, sizeof text,
      "%s: outputs %zu of %zu differ (max %.2g), %zu unwritten; state %zu of %zu differ (max %.2g)",
      kCanonical ? "canonical" : "free", mo.different, o.size(), mo.largest, mo.unwritten,
      ms.different, end.state.size(), ms.largest);
  section.Line("%s", text);
  if (kCanonical) return section.Expect(mo.different + mo.unwritten + ms.different == 0, text);
  return section.Expect(
      mo.different > 0 && mo.unwritten == 0 && mo.largest < 1e-4 && ms.largest < 1e-4, text);
}

inline void RunDelta(Section& section, bool measure) {
  const uint32_t tokens = measure ? kTokensMeasured : kTokensChecked;
  const DeltaData start = RandomDelta(tokens);
  DeltaData end = start;
  const std::vector<float> o = HostDelta(end, kTokensChecked);
  DeltaContext c;
  LODE_TRY(section, c.q.Upload(start.q), );
  LODE_TRY(section, c.k.Upload(start.k), );
  LODE_TRY(section, c.v.Upload(start.v), );
  LODE_TRY(section, c.g.Upload(start.g), );
  LODE_TRY(section, c.beta.Upload(start.beta), );
  LODE_TRY(section, c.state.Upload(start.state), );
  LODE_TRY(section, c.o.Allocate(static_cast<size_t>(tokens) * kHeads * kValues), );
  if (!CheckDelta<true>(section, c, start, end, o) || !CheckDelta<false>(section, c, start, end, o))
    return;
  if (!measure) return;
  const double free_ms = MedianMs(section, 1, [&] { LaunchDelta<false>(c, tokens); });
  const double canonical_ms = MedianMs(section, 1, [&] { LaunchDelta<true>(c, tokens); });
  if (free_ms <= 0 || canonical_ms <= 0) return;
  section.Value("free ms", free_ms);
  section.Value("canonical ms", canonical_ms);
  section.Line("4096 tokens, one layer: free %.3f ms, canonical %.3f ms, canonical/free %.3f",
               free_ms, canonical_ms, canonical_ms / free_ms);
}

}  // namespace lode::term_order
