// Cells of LSTMs and GRUs, which PyTorch asks a device for as a whole.
//
//     gates of the input ──┬── + ── sigmoid, tanh ── cell ── new state
//     gates of the state ──┘              `── workspace, for the backward
#include <ATen/TensorOperators.h>
#include <ATen/core/IListRef_inl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace sim {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const Optional& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

Tensor slope_of_sigmoid(const Tensor& value) {
  return value * (1 - value);
}

Tensor slope_of_tanh(const Tensor& value) {
  return 1 - value * value;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& of_input,
    const Tensor& of_state,
    const Tensor& cx,
    const Optional& input_bias,
    const Optional& state_bias) {
  const auto sums = with_bias(of_state, state_bias) + with_bias(of_input, input_bias);
  const auto gates = sums.chunk(4, 1);
  const auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(),
             out = gates[3].sigmoid();
  const auto cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const Optional& grad_hy,
    const Optional& grad_cy,
    const Tensor& cx,
    const Tensor& cy,
    const Tensor& workspace,
    bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const auto &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const auto tanh_cy = cy.tanh();
  const auto hy = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
  auto grad = hy * out * slope_of_tanh(tanh_cy);
  if (grad_cy && grad_cy->defined()) grad = grad + *grad_cy;
  const auto grad_gates = at::cat(
      {grad * cell * slope_of_sigmoid(in),
       grad * cx * slope_of_sigmoid(forget),
       grad * in * slope_of_tanh(cell),
       hy * tanh_cy * slope_of_sigmoid(out)},
      1);
  return {grad_gates, grad * forget, has_bias ? grad_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& of_input,
    const Tensor& of_state,
    const Tensor& hx,
    const Optional& input_bias,
    const Optional& state_bias) {
  const auto inputs = with_bias(of_input, input_bias).chunk(3, 1);
  const auto states = with_bias(of_state, state_bias).chunk(3, 1);
  const auto reset = (inputs[0] + states[0]).sigmoid(), update = (inputs[1] + states[1]).sigmoid();
  const auto fresh = (inputs[2] + reset * states[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, states[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad, const Tensor& workspace, bool has_bias) {
  const auto kept = workspace.chunk(5, 1);
  const auto &reset = kept[0], &update = kept[1], &fresh = kept[2], &hx = kept[3], &state = kept[4];
  const auto of_fresh = grad * (1 - update) * slope_of_tanh(fresh);
  const auto of_update = grad * (hx - fresh) * slope_of_sigmoid(update);
  const auto of_reset = of_fresh * state * slope_of_sigmoid(reset);
  const auto of_input = at::cat({of_reset, of_update, of_fresh}, 1);
  const auto of_state = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  return {
      of_input,
      of_state,
      grad * update,
      has_bias ? of_input.sum(0) : Tensor(),
      has_bias ? of_state.sum(0) : Tensor()};
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

} // namespace sim
