"""Train a model. This file is the program, read top to bottom; the loop is in `main`.

    accelerate launch train.py                                   configs/digits.yaml, this machine
    accelerate launch --config_file accelerate_configs/cpu_2.yaml train.py configs/digits.yaml
    accelerate launch train.py configs/cifar10.yaml seed=1 optimizer.lr=3e-4
    python train.py configs/cifar10.yaml --help                  every key of that run config

The run config decides the result, the hardware file the speed.
"""
