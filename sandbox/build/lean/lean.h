// The part of PyTorch's C++ interface that kernels' host code uses, small enough to be parsed in a tenth of a second: stands
// on the include path under the names of PyTorch's own headers (sandbox/build/lean_road.py). What it lacks does not
// compile, and the source takes another road.
#pragma once

#include <cassert>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <limits>
#include <tuple>
#include <vector>
#ifndef SANDBOX_LEAN_LIGHT
#include <algorithm>
#include <functional>
#include <iostream>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <unordered_map>
#endif

#include "base.h"
#include "dispatch.h"
#include "tensor.h"
#if defined(__CUDACC__) || defined(SANDBOX_LEAN_CUDA)
#include "cuda.h"
#endif

namespace c10 {
using namespace sandbox_lean;
}
namespace at {
using namespace sandbox_lean;
}
namespace torch {
using namespace sandbox_lean;
}
#if defined(__CUDACC__) || defined(SANDBOX_LEAN_CUDA)
namespace c10::cuda {
using namespace sandbox_lean::cuda;
}
namespace at::cuda {
using namespace sandbox_lean::cuda;
}
namespace torch::cuda {
using namespace sandbox_lean::cuda;
}
#endif
namespace caffe2 {
using sandbox_lean::TypeMeta;
}
