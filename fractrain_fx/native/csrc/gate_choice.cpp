// One step of the controller of all gates (nn/gates.py) with its gradients.

#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "gate_layers.h"

namespace fractrain_fx {
namespace {

// The probabilities of options from `lowest` on, and the one-hot of the first largest of them.
void choose(const Lines& logits, int64_t lowest, Lines& picked, float* probabilities) {
  const int64_t options = logits.features();
  float top[kSamples], sum[kSamples] = {}, best[kSamples] = {};
  std::copy_n(logits[lowest], kSamples, top);
  const auto line = [&](int64_t k) { return probabilities + k * kSamples; };
  for_each(options, [&](int64_t k, int64_t t) {
    top[t] = k >= lowest && logits[k][t] > top[t] ? logits[k][t] : top[t];
  });
  for_each(options, [&](int64_t k, int64_t t) {
    const float each = k < lowest ? 0.0f : exp_of(logits[k][t] - top[t]);
    line(k)[t] = each;
    sum[t] += each;
  });
  for_each(options, [&](int64_t k, int64_t t) {
    line(k)[t] /= sum[t];
    best[t] = line(k)[t] > best[t] ? line(k)[t] : best[t];
  });
  float left[kSamples];
  std::fill_n(left, kSamples, 1.0f);
  for_each(options, [&](int64_t k, int64_t t) {
    picked[k][t] = k >= lowest && line(k)[t] == best[t] ? left[t] : 0.0f;
    left[t] -= picked[k][t];
  });
  for (int64_t t = 0; t < kSamples; ++t) picked[lowest][t] += left[t];  // no probability is the largest of NaN
}

// One step of the controller: an LSTM cell, its head, and the one-hot of the first largest probability from option
// `lowest` on. Also gives the new state, and what the gradients need: the four gates of the cell, the tanh of its new
// state, and the probabilities, in one row for each sample.
std::tuple<Tensor, Tensor, Tensor, Tensor> gate_choice(const Tensor& x, const Maybe& h, const Maybe& c,
                                                       const Tensor& w_x, const Tensor& w_h, const Tensor& b_x,
                                                       const Tensor& b_h, const Tensor& w_o, const Tensor& b_o,
                                                       int64_t lowest) {
  const Layer of_x(w_x, b_x), of_h(w_h, b_h), head(w_o, b_o);
  const Given given(x), given_h(h), given_c(c);
  const int64_t size = of_h.inputs, options = head.outputs;
  Tensor choice = rows(x, options), next_h = rows(x, size), next_c = rows(x, size), kept = rows(x, 5 * size + options);
  Lines in(of_x.inputs), hidden(size), cell(size), gates(4 * size), picked(options), logits(options);
  Lines saved(5 * size + options);
  for_samples(x, [&](int64_t first, int64_t count) {
    given.into(in, first, count);
    given_h.into(hidden, first, count);
    given_c.into(cell, first, count);
    of_x.forward(in, gates);
    of_h.forward(hidden, gates, true);
    for (int64_t k = 0; k < size; ++k) {
      const float *input = gates[k], *forget = gates[size + k];
      const float *candidate = gates[2 * size + k], *output = gates[3 * size + k];
      float *i = saved[k], *f = saved[size + k], *a = saved[2 * size + k], *o = saved[3 * size + k];
      float *tanh = saved[4 * size + k], *c_to = cell[k], *h_to = hidden[k];
#pragma omp simd
      for (int64_t t = 0; t < kSamples; ++t) {
        i[t] = sigmoid_of(input[t]);
        f[t] = sigmoid_of(forget[t]);
        a[t] = tanh_of(candidate[t]);
        o[t] = sigmoid_of(output[t]);
        c_to[t] = f[t] * c_to[t] + i[t] * a[t];
        tanh[t] = tanh_of(c_to[t]);
        h_to[t] = o[t] * tanh[t];
      }
    }
    head.forward(hidden, logits);
    choose(logits, lowest, picked, saved[5 * size]);
    give(picked, choice, first, count);
    give(hidden, next_h, first, count);
    give(cell, next_c, first, count);
    give(saved, kept, first, count);
  });
  return {choice, next_h, next_c, kept};
}

// The gradients of x, h, c, and of the weights and biases in their order, from those of the choice and of the new
// state.
std::vector<Tensor> gate_choice_errors(const Maybe& of_choice, const Maybe& of_h, const Maybe& of_c, const Tensor& x,
                                       const Maybe& h, const Maybe& c, const Tensor& next_h, const Tensor& kept,
                                       const Tensor& w_x, const Tensor& w_h, const Tensor& b_x, const Tensor& b_h,
                                       const Tensor& w_o, const Tensor& b_o) {
  const Layer by_x(w_x, b_x), by_h(w_h, b_h), head(w_o, b_o);
  const int64_t size = by_h.inputs, options = head.outputs;
  const Given choices(of_choice), hs(of_h), cs(of_c), given(x), given_h(h), given_c(c), next(next_h), given_kept(kept);
  Tensor of_x = rows(x, by_x.inputs), before_h = rows(x, size), before_c = rows(x, size);
  Tensor of_w_x = at::zeros_like(by_x.weight), of_w_h = at::zeros_like(by_h.weight), of_b_x = at::zeros_like(by_x.bias);
  Tensor of_b_h = at::zeros_like(by_h.bias), of_w_o = at::zeros_like(head.weight), of_b_o = at::zeros_like(head.bias);
  Lines of_in(by_x.inputs), cell(size), of_hidden(size), of_cell(size), through(size), gates(4 * size);
  Lines picked(options), saved(5 * size + options);
  for_samples(x, [&](int64_t first, int64_t count) {
    given_c.into(cell, first, count);
    given_kept.into(saved, first, count);
    hs.into(of_hidden, first, count);
    cs.into(of_cell, first, count);
    if (choices) {
      choices.into(picked, first, count);
      // The one-hot passes its gradient on to the probabilities, and the softmax to the logits.
      float mean[kSamples] = {};
      const auto probability = [&](int64_t k) { return saved[5 * size + k]; };
      for_each(options, [&](int64_t k, int64_t t) { mean[t] += probability(k)[t] * picked[k][t]; });
      for_each(options, [&](int64_t k, int64_t t) { picked[k][t] = probability(k)[t] * (picked[k][t] - mean[t]); });
      head.add_gradients(picked, next.at(first), count, of_w_o, of_b_o);
      head.errors(picked, through);
      for_each(size, [&](int64_t k, int64_t t) { of_hidden[k][t] += through[k][t]; });
    }
    for_each(size, [&](int64_t k, int64_t t) {
      const float i = saved[k][t], f = saved[size + k][t], a = saved[2 * size + k][t], o = saved[3 * size + k][t];
      const float tanh = saved[4 * size + k][t], g = of_hidden[k][t];
      const float g_c = of_cell[k][t] + g * o * (1.0f - tanh * tanh);
      gates[k][t] = g_c * a * i * (1.0f - i);
      gates[size + k][t] = g_c * cell[k][t] * f * (1.0f - f);
      gates[2 * size + k][t] = g_c * i * (1.0f - a * a);
      gates[3 * size + k][t] = g * tanh * o * (1.0f - o);
      of_cell[k][t] = g_c * f;
    });
    by_x.add_gradients(gates, given.at(first), count, of_w_x, of_b_x);
    by_x.errors(gates, of_in);
    give(of_in, of_x, first, count);
    by_h.add_gradients(gates, given_h.at(first), count, of_w_h, of_b_h);
    if (given_h) {
      by_h.errors(gates, of_hidden);
      give(of_hidden, before_h, first, count);
      give(of_cell, before_c, first, count);
    }
  });
  return {of_x, before_h, before_c, of_w_x, of_w_h, of_b_x, of_b_h, of_w_o, of_b_o};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fractrain_fx, library) {
  library.def(
      "gate_choice(Tensor x, Tensor? h, Tensor? c, Tensor w_x, Tensor w_h, Tensor b_x, Tensor b_h, Tensor w_o, Tensor "
      "b_o, int lowest) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "gate_choice_errors(Tensor? of_choice, Tensor? of_h, Tensor? of_c, Tensor x, Tensor? h, Tensor? c, "
      "Tensor next_h, Tensor kept, Tensor w_x, Tensor w_h, Tensor b_x, Tensor b_h, Tensor w_o, Tensor b_o) "
      "-> Tensor[]");
}

TORCH_LIBRARY_IMPL(fractrain_fx, CPU, library) {
  library.impl("gate_choice", gate_choice);
  library.impl("gate_choice_errors", gate_choice_errors);
}

}  // namespace fractrain_fx
