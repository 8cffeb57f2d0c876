// Rotary tables: inverse frequencies and sines, in binary64 multiplications and additions only (no fused operation, so that a
// build without FMA gives the same bits). Used at set-up on the host and per (row, pair) on the device; 32 values per row.
#pragma once

#include "kernels/canonical.h"

namespace lode::canonical {

// Natural logarithm of a positive normal double, relative error about 2e-16: x = m * 2^e, m in [0.7, 1.42), then the
// series 2 atanh(s), s = (m - 1)/(m + 1), s^2 < 0.03, 13 terms.
LODE_FN double LogD(double x) {
  const uint64_t bits = BitsOfDouble(x);
  int e = static_cast<int>(bits >> 52) - 1023;
  double m = DoubleFromBits((bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull);
  if (m > 1.41421356237309515) {
    m = MulD(m, 0.5);
    ++e;
  }
  const double s = (m - 1.0) / (m + 1.0);
  const double s2 = MulD(s, s);
  double sum = 0;
  for (int k = 25; k >= 3; k -= 2) sum = AddD(MulD(sum, s2), 1.0 / k);
  sum = MulD(MulD(sum, s2), s);
  return AddD(MulD(static_cast<double>(e), 0.693147180559945309417), AddD(MulD(2.0, s), MulD(2.0, sum)));
}

// e^x for |x| < 700: x = n ln2 + r (two-part ln2), Taylor series of r to degree 14.
LODE_FN double ExpD(double x) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52
  const double n = AddD(AddD(MulD(x, 1.44269504088896338700), magic), -magic);
  double r = AddD(x, -MulD(n, 6.93147180369123816490e-01));
  r = AddD(r, -MulD(n, 1.90821492927058770002e-10));
  double p = 1.0;
  for (int k = 14; k >= 1; --k) p = AddD(MulD(p, r / k), 1.0);
  const int64_t i = static_cast<int64_t>(n);
  return MulD(p, DoubleFromBits(static_cast<uint64_t>(i + 1023) << 52));
}

// Inverse frequency of rotary pair `pair`: theta^(-2 pair / dims), rounded to float once.
LODE_FN float RopeInvFreq(double theta, uint32_t pair, uint32_t dims) {
  return static_cast<float>(ExpD(-MulD(LogD(theta), 2.0 * pair / dims)));
}

struct SinCosResult {
  float sin, cos;
};
// Sine and cosine of a finite float |x| < 2^26: the quadrant by binary64 with a three-part pi/2, then minimax polynomials
// on [-pi/4, pi/4]; each result is rounded to float once (error below 0.51 ulp).
LODE_FN SinCosResult SinCos(float angle) {
  const double x = static_cast<double>(angle);
  const double magic = 6755399441055744.0;
  const double t = AddD(MulD(x, 0.636619772367581343076), magic);
  const uint32_t quadrant = static_cast<uint32_t>(BitsOfDouble(t)) & 3u;
  const double k = AddD(t, -magic);
  // pi/2 in parts of 27, 27 and 53 bits: the first two products with |k| < 2^26 are exact.
  double r = AddD(x, -MulD(k, 1.570796325802803));
  r = AddD(r, -MulD(k, 9.920935739593517e-10));
  r = AddD(r, -MulD(k, 5.721188726109832e-18));
  const double z = MulD(r, r);
  double s = 1.58962301576546568060e-10;
  s = AddD(MulD(s, z), -2.50507477628578072866e-8);
  s = AddD(MulD(s, z), 2.75573136213857245213e-6);
  s = AddD(MulD(s, z), -1.98412698295895385996e-4);
  s = AddD(MulD(s, z), 8.33333333332211858878e-3);
  s = AddD(MulD(s, z), -1.66666666666666307295e-1);
  s = AddD(r, MulD(MulD(s, z), r));
  double c = -1.13585365213876817300e-11;
  c = AddD(MulD(c, z), 2.08757008419747316778e-9);
  c = AddD(MulD(c, z), -2.75573141792967388112e-7);
  c = AddD(MulD(c, z), 2.48015872888517045348e-5);
  c = AddD(MulD(c, z), -1.38888888888730564116e-3);
  c = AddD(MulD(c, z), 4.16666666666665929218e-2);
  c = AddD(AddD(1.0, -MulD(0.5, z)), MulD(MulD(c, z), z));
  const double sn = (quadrant & 1) ? c : s;
  const double cs = (quadrant & 1) ? s : c;
  return {static_cast<float>((quadrant & 2) ? -sn : sn),
          static_cast<float>(((quadrant + 1) & 2) ? -cs : cs)};
}

}  // namespace lode::canonical
