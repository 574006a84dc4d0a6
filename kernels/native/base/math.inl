// Functions of one vector, built from the words of simd/: relative errors of a few units in the
// last place, NaN for NaN, the same bits on every target.
//
// Exponentials are a power of two times a polynomial on [-1/2, 1/2] binary digits (Cody and Waite,
// Software Manual for the Elementary Functions, 1980); coefficients are minimax fits of relative
// error. Results below 2^-126.5 are 0 and results above 2^127.5 infinite: one multiplication builds
// the power of two, without a case for subnormals.

// 1.5 * 2^23 + 127: the low bits of x + kRound are round(x) + 127, an encoded exponent.
static constexpr float kRound = 12583039.0f;

PDS_INLINE F power_of_two(F rounded) { return as_float(shift_left(as_int(rounded), 23)); }
PDS_INLINE F magnitude(F x) { return as_float(and_(as_int(x), set1_i(0x7fffffff))); }
PDS_INLINE I sign(F x) { return and_(as_int(x), set1_i((int32_t)0x80000000)); }

// Returns 2^x for x <= 0 or NaN, for the weights of a softmax; relative error 2e-7.
PDS_INLINE F exp2_nonpositive(F x) {
  x = max(set1(-127.0f), x);  // returns the second operand if it is NaN
  F rounded = add(x, set1(kRound));
  F f = sub(x, sub(rounded, set1(kRound)));
  F p = set1(0.001326472389f);
  p = fma(p, f, set1(0.00967151287f));
  p = fma(p, f, set1(0.05550733754f));
  p = fma(p, f, set1(0.2402224208f));
  p = fma(p, f, set1(0.6931469776f));
  p = fma(p, f, set1(1.0f));
  return mul(p, power_of_two(rounded));
}

PDS_INLINE F exp(F x) {
  x = min(set1(88.72284f), max(set1(-88.02969f), x));  // 128 and -127 times ln 2
  F rounded = fma(x, set1(1.44269504f), set1(kRound));
  F n = sub(rounded, set1(kRound));
  F r = fma(n, set1(-0.693359375f), x);  // ln 2 in two parts, the first exact in 10 bits
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(0.0013814611f);
  p = fma(p, r, set1(0.008368710035f));
  p = fma(p, r, set1(0.04166838741f));
  p = fma(p, r, set1(0.1666652069f));
  p = fma(p, r, set1(0.4999999345f));
  p = add(fma(mul(r, r), p, r), set1(1.0f));
  return mul(p, power_of_two(rounded));
}

// Returns x / (1 + e^-y): sigmoid for x = 1, SiLU for x = y.
PDS_INLINE F times_sigmoid(F x, F y) { return div(x, add(set1(1.0f), exp(sub(zero(), y)))); }
PDS_INLINE F sigmoid(F x) { return times_sigmoid(set1(1.0f), x); }

PDS_INLINE F tanh(F x) {
  F size = magnitude(x), z = mul(x, x);
  F p = set1(-0.005704978373f);
  p = fma(p, z, set1(0.02063907874f));
  p = fma(p, z, set1(-0.05373971216f));
  p = fma(p, z, set1(0.1333144216f));
  p = fma(p, z, set1(-0.3333328194f));
  F small = fma(mul(p, z), x, x);
  F big = sub(set1(1.0f), div(set1(2.0f), add(exp(add(size, size)), set1(1.0f))));
  return select(less(size, set1(0.625f)), small, as_float(or_(as_int(big), sign(x))));
}

PDS_INLINE F erf(F x) {
  F size = min(set1(4.0f), magnitude(x)), z = mul(size, size);  // erf(4) rounds to 1
  F p = set1(7.853857666e-05f);
  p = fma(p, z, set1(-0.0008010192508f));
  p = fma(p, z, set1(0.005188327558f));
  p = fma(p, z, set1(-0.02685381187f));
  p = fma(p, z, set1(0.1128358515f));
  p = fma(p, z, set1(-0.3761262582f));
  p = fma(p, z, set1(1.128379166f));
  F small = mul(p, x);
  F q = set1(0.0001863800844f);  // log(1 - erf) on [1, 4]
  q = fma(q, size, set1(-0.002947666798f));
  q = fma(q, size, set1(0.02183809697f));
  q = fma(q, size, set1(-0.1031068214f));
  q = fma(q, size, set1(-0.6381447582f));
  q = fma(q, size, set1(-1.127089234f));
  q = fma(q, size, set1(-0.0003415125886f));
  F big = sub(set1(1.0f), exp(q));
  return select(less(size, set1(1.0f)), small, as_float(or_(as_int(big), sign(x))));
}
