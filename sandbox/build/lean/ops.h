// Operations that need nothing but forwarding, by the form of their arguments. All are methods of a tensor; those in lists
// without METHODS are functions of the namespaces too.
#pragma once

#define SANDBOX_LEAN_UNARY(X)                                                                                          \
  X(abs) X(all) X(any) X(ceil) X(clone) X(cos) X(detach) X(erf) X(exp) X(flatten) X(floor) X(isnan) X(log) X(max) X(mean) \
  X(min) X(neg) X(reciprocal) X(relu) X(round) X(rsqrt) X(sigmoid) X(sign) X(sin) X(sqrt) X(square) X(squeeze) X(sum) X(t) \
  X(tanh)
#define SANDBOX_LEAN_UNARY_METHODS(X) X(cpu) X(cuda) X(relu_) X(zero_) X(neg_) X(exp_) X(sigmoid_) X(tanh_)
#define SANDBOX_LEAN_BINARY(X) \
  X(add) X(sub) X(mul) X(div) X(matmul) X(mm) X(bmm) X(mv) X(dot) X(maximum) X(minimum) X(eq) X(ne) X(lt) X(gt) X(le) X(ge)
#define SANDBOX_LEAN_BINARY_METHODS(X) X(expand_as) X(view_as) X(reshape_as) X(copy_) X(add_) X(sub_) X(mul_) X(div_)
#define SANDBOX_LEAN_SCALAR(X) X(add) X(sub) X(mul) X(div) X(pow) X(clamp_min) X(clamp_max) X(eq) X(ne) X(lt) X(gt) X(le) X(ge)
#define SANDBOX_LEAN_SCALAR_METHODS(X) X(add_) X(sub_) X(mul_) X(div_) X(fill_)
#define SANDBOX_LEAN_DIM(X) X(unsqueeze) X(squeeze) X(softmax) X(log_softmax) X(cumsum) X(cumprod) X(argmax) X(argmin) X(flatten)
#define SANDBOX_LEAN_TWO_DIMS(X) X(transpose) X(select)
#define SANDBOX_LEAN_LIST(X) X(view) X(reshape) X(permute) X(expand) X(repeat) X(flip)
