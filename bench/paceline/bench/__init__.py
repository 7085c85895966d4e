"""Measurements of Paceline, recorded in ``bench/results``. Works from a source checkout.

- ``paceline bench table``: speed of every drafter and of transformers, llama.cpp, OpenVINO and any
  server with OpenAI's interface, on the same prompts of ``bench/prompts``, by category.
- ``paceline bench acceptance``: accepted length of drafters, by depth, without services.
- ``paceline bench papers``: what the papers measured, an experiment at a time.
- ``paceline bench step``: a decoder step by rows and context, prefill and plain decoding; with
  ``--rivals`` beside transformers and llama.cpp.
- ``paceline bench quality``: what quantised weights change in a model's predictions.
- ``paceline bench drills``: fault injection under load; what must hold, and whether it did.
- ``make gpu-check``: the tests of ``tests/gpu``, then ``python -m paceline.bench.gpu``: speed of
  kernels, of a decoder step, and of what else attends on a GPU.

Every command writes ``bench/results/MACHINE-COMMAND.json`` (``--output``), where MACHINE is the
kind of machine. A run replaces the entries it measured and keeps those of the same machine and
models.
"""
