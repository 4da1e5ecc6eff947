"""How long each road takes to build C++ extensions, nothing cached.

    python scripts/bench/build_roads.py --out scripts/bench/results/build_roads_cpu.json

Builds a handful of C++ sources in compile jails, each made distinct by a number, by the lean and the fast road into
empty stores (whose one-time steps, support library and precompiled header, are timed apart), then by the plain road. Writes
JSON with every sample, the load of the machine before it, versions, cores, date and command.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

from serving import provenance

from sandbox.build.artifacts import ArtifactStore
from sandbox.build.cpp import find_compiler
from sandbox.build.extension import parse_request
from sandbox.build.roads import ExtensionBuilder
from sandbox.jail.spawn import Zygote

FLAGS = ["-O3"]
SOURCES = {
    "add": (
        ["add"],
        """torch::Tensor add(torch::Tensor x, torch::Tensor y) {
  auto out = torch::empty_like(x);
  const float *a = x.data_ptr<float>(), *b = y.data_ptr<float>();
  float* o = out.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) o[i] = a[i] + b[i] + NUMBER;
  return out;
}""",
    ),
    "relu_parallel": (
        ["my_relu"],
        """torch::Tensor my_relu(const torch::Tensor& x) {
  auto out = torch::empty_like(x);
  const float* a = x.data_ptr<float>();
  float* o = out.data_ptr<float>();
  at::parallel_for(0, x.numel(), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) o[i] = a[i] > NUMBER ? a[i] : 0;
  });
  return out;
}""",
    ),
    "softmax_dispatch": (
        ["softmax_rows"],
        """template <typename T> void rows(const T* x, T* out, int64_t n, int64_t d) {
  for (int64_t r = 0; r < n; ++r) {
    T largest = x[r * d], sum = NUMBER;
    for (int64_t i = 1; i < d; ++i) largest = std::max(largest, x[r * d + i]);
    for (int64_t i = 0; i < d; ++i) sum += out[r * d + i] = std::exp(x[r * d + i] - largest);
    for (int64_t i = 0; i < d; ++i) out[r * d + i] /= sum;
  }
}
torch::Tensor softmax_rows(torch::Tensor x) {
  TORCH_CHECK(x.dim() == 2, "x must be a matrix");
  auto out = torch::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "softmax_rows", [&] {
    rows<scalar_t>(x.data_ptr<scalar_t>(), out.data_ptr<scalar_t>(), x.size(0), x.size(1));
  });
  return out;
}""",
    ),
    "two_functions": (
        ["norm", "both"],
        """torch::Tensor norm(torch::Tensor x, double eps) {
  auto rows = x.accessor<float, 2>();
  auto out = torch::zeros({x.size(0)}, x.options());
  for (int64_t r = 0; r < x.size(0); ++r) {
    double sum = NUMBER + eps;
    for (int64_t i = 0; i < x.size(1); ++i) sum += rows[r][i] * rows[r][i];
    out[r] = std::sqrt(sum);
  }
  return out;
}
std::tuple<torch::Tensor, torch::Tensor> both(std::vector<torch::Tensor> xs, std::optional<torch::Tensor> y) {
  return {torch::stack(xs), y.value_or(xs[0])};
}""",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3, help="of each source on the lean and the fast road")
    parser.add_argument("--plain-repeats", type=int, default=1, help="of each source on the plain road")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="build_roads-") as name:
        scratch = Path(name)
        zygote = Zygote(modules=[], threads=1, directory=scratch)
        try:
            report = measure(zygote, scratch, options)
        finally:
            zygote.close()
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: report[key] for key in ("one_time_s", "median_s", "worst_s")}))


def measure(zygote: Zygote, scratch: Path, options: argparse.Namespace) -> dict:
    """All samples, and their medians by road."""
    began = provenance()
    parts = {"zygote": zygote, "scratch": scratch}
    lean = ExtensionBuilder(store=ArtifactStore(scratch / "lean"), **parts)
    fast = ExtensionBuilder(store=ArtifactStore(scratch / "fast"), roads=("fast", "plain"), **parts)
    one_time = {road: timed_build(of, "int warm_up() { return NUMBER; }", ["warm_up"]) for road, of in (("lean", lean), ("fast", fast))}
    samples = []
    plain = ExtensionBuilder(store=ArtifactStore(scratch / "plain"), roads=("plain",), **parts)
    for builder, repeats in ((lean, options.repeats), (fast, options.repeats), (plain, options.plain_repeats)):
        for _ in range(repeats):
            for name, (functions, source) in SOURCES.items():
                samples.append({"source": name, **timed_build(builder, source, functions)})
                print(samples[-1], flush=True)
    by_road = {road: [sample["wall_s"] for sample in samples if sample["road"] == road] for road in ("lean", "fast", "plain")}
    return {
        **began,
        "processor": platform.processor() or platform.machine(),
        "compiler": find_compiler().version,
        "isolation": zygote.level,
        "flags": FLAGS,
        "one_time_s": {road: round(first["wall_s"] - first["compiler_s"], 2) for road, first in one_time.items()},
        "median_s": {road: round(statistics.median(walls), 2) for road, walls in by_road.items() if walls},
        "worst_s": {road: round(max(walls), 2) for road, walls in by_road.items() if walls},
        "samples": samples,
    }


def timed_build(builder: ExtensionBuilder, source: str, functions: list[str]) -> dict:
    """Builds a source that nobody has built before."""
    number = str(time.time_ns() % 10**7 + 1)
    request = parse_request(
        {
            "name": "bench",
            "cpp_sources": source.replace("NUMBER", number),
            "functions": functions,
            "extra_cflags": FLAGS,
        }
    )
    load = os.getloadavg()[0]
    start = time.monotonic()
    built = builder.build(request, 600.0)
    wall_s = time.monotonic() - start
    assert not built.cached
    return {
        "road": built.road,
        "wall_s": round(wall_s, 2),
        "compiler_s": round(built.seconds, 2),
        "load_average": round(load, 2),
    }


if __name__ == "__main__":
    main()
