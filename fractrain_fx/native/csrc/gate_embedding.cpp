// The embedding of a gate (nn/gates.py) with its gradients. Its matrices are so small that as torch's operations they
// mostly wait for threads.

#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <tuple>

#include "gate_layers.h"

namespace fractrain_fx {
namespace {

// Linear, ReLU, Linear: the embedding and the values between both layers, one row for each sample.
std::tuple<Tensor, Tensor> gate_embedding(const Tensor& x, const Tensor& w1, const Tensor& b1, const Tensor& w2,
                                          const Tensor& b2) {
  const Layer one(w1, b1), two(w2, b2);
  const Given given(x);
  Tensor out = rows(x, two.outputs), between = rows(x, one.outputs);
  Lines in(one.inputs), hidden(one.outputs), found(two.outputs);
  for_samples(x, [&](int64_t first, int64_t count) {
    given.into(in, first, count);
    one.forward(in, hidden);
    for_each(one.outputs, [&](int64_t i, int64_t t) { hidden[i][t] = hidden[i][t] < 0.0f ? 0.0f : hidden[i][t]; });
    two.forward(hidden, found);
    give(hidden, between, first, count);
    give(found, out, first, count);
  });
  return {out, between};
}

// The gradients of x and of both layers.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gate_embedding_errors(const Tensor& g, const Tensor& x,
                                                                         const Tensor& between, const Tensor& w1,
                                                                         const Tensor& b1, const Tensor& w2,
                                                                         const Tensor& b2) {
  const Layer one(w1, b1), two(w2, b2);
  const Given given(x), given_g(g), given_between(between);
  Tensor of_x = rows(x, one.inputs);
  Tensor of_w1 = at::zeros_like(one.weight), of_b1 = at::zeros_like(one.bias);
  Tensor of_w2 = at::zeros_like(two.weight), of_b2 = at::zeros_like(two.bias);
  Lines hidden(one.outputs), out(two.outputs), of_in(one.inputs), of_hidden(one.outputs);
  for_samples(x, [&](int64_t first, int64_t count) {
    given_between.into(hidden, first, count);
    given_g.into(out, first, count);
    two.add_gradients(out, given_between.at(first), count, of_w2, of_b2);
    two.errors(out, of_hidden);
    for_each(one.outputs, [&](int64_t i, int64_t t) {
      of_hidden[i][t] = hidden[i][t] > 0.0f ? of_hidden[i][t] : 0.0f;
    });
    one.add_gradients(of_hidden, given.at(first), count, of_w1, of_b1);
    one.errors(of_hidden, of_in);
    give(of_in, of_x, first, count);
  });
  return {of_x, of_w1, of_b1, of_w2, of_b2};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fractrain_fx, library) {
  library.def("gate_embedding(Tensor x, Tensor w1, Tensor b1, Tensor w2, Tensor b2) -> (Tensor, Tensor)");
  library.def(
      "gate_embedding_errors(Tensor g, Tensor x, Tensor between, Tensor w1, Tensor b1, Tensor w2, Tensor b2) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(fractrain_fx, CPU, library) {
  library.impl("gate_embedding", gate_embedding);
  library.impl("gate_embedding_errors", gate_embedding_errors);
}

}  // namespace fractrain_fx
