"""Plain torch: models, losses, metrics and optimizers that know nothing of ranks or layouts.

gpt.py llama.py moe.py bert.py   language models; gpt.py is the simplest: read it first
causal_attention.py   causal attention, of packed documents too
reference.py   a model next to a frozen one: a teacher, or itself as it began
resnet.py convnet.py insightface.py mlp.py wide_deep.py gan.py   images, faces, click rates
losses.py metrics.py   functions of (output, batch) -> the mean over the batch
lora.py fp8.py   adapters for the linears of any model; linears of 8 bits
optimizers.py    functions of tensors: (param, grad, states, …) -> (new param, new states)
sampling.py      which samples a step reads: a permutation, or drawn by weight
"""
