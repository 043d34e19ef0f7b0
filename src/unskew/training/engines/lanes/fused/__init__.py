"""Convolution, ReLU and 2 x 2 maximum fused for all lanes: kernels for small networks such as CCVR's CNN.

What they are worth, in lane-steps/s of that CNN (92,626 parameters, batch 64, bfloat16, crops and flips) on one H200:

    lanes    grouped (cuDNN)    fused, first kernels    fused, today
    32                29,851                  41,097          84,657
    64                39,378                  52,211          97,048

    python benchmarks/lanes.py steps --lanes 32,64 --precision bfloat16 --layout grouped,fused

The first two columns were measured side by side, the last with a later step. In TF32 the first kernels were no faster
than cuDNN (19,176 against 20,036); today's make 42,300 with 32 lanes. `step` and `auto` alone look into this folder.
"""
