#!/usr/bin/env bash
# Train on several machines: the same command on each, with its own MACHINE_RANK (0, 1, ...).
#
#   NUM_MACHINES=2 PROCESSES_PER_MACHINE=8 MAIN_ADDRESS=10.0.0.1 MACHINE_RANK=0 \
#     launch/multi_node.sh configs/cifar10.yaml name=mine
#
# Run it from the repository's folder. Machine 0 is the one at MAIN_ADDRESS; they may start in any
# order, and wait 15 minutes for each other. Expect "16 process(es)" in the first lines of machine 0,
# which also prints the log. Each returns 0 when the run is finished, and 75 when it was stopped
# (SIGTERM, SIGINT or SIGUSR1 to any one of them): then the same commands go on.
#
# Every machine needs the same code and packages, and `runs/` (output_dir) on a file system that all
# of them share. Give the run a name, or `resume: auto` will not find it again.
#
# Also MAIN_PORT (29500) and HARDWARE_FILE (accelerate_configs/multi_node.yaml). If the machines
# cannot find each other, name the network: NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0.
set -euo pipefail

: "${NUM_MACHINES:?how many machines there are}"
: "${PROCESSES_PER_MACHINE:?usually the number of GPUs of a machine}"
: "${MAIN_ADDRESS:?the address of machine 0, as the others reach it}"
MACHINE_RANK=${MACHINE_RANK:-${SLURM_PROCID:?MACHINE_RANK: 0 on the machine at MAIN_ADDRESS, then 1, 2, ...}}

# exec, so that a signal to this process reaches the launcher
exec python -m evenstep.launch \
  --config_file "${HARDWARE_FILE:-accelerate_configs/multi_node.yaml}" \
  --num_machines "$NUM_MACHINES" \
  --num_processes "$((NUM_MACHINES * PROCESSES_PER_MACHINE))" \
  --machine_rank "$MACHINE_RANK" \
  --main_process_ip "$MAIN_ADDRESS" \
  --main_process_port "${MAIN_PORT:-29500}" \
  train.py "$@"
