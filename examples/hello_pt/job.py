"""The job of NVIDIA FLARE's hello-pt as a recipe:

python job.py                                                     digits, two clients as processes of this machine
python job.py --env sim --n_clients 8                             the same in simulation
python job.py --train_args "--dataset cifar10 --data FOLDER"      on CIFAR-10, from its binary version
"""

import argparse
import os
from pathlib import Path

from model import SimpleNetwork

from atoll.recipes import FedAvgRecipe, LocalEnv, SimEnv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n_clients", type=int, default=2)
    parser.add_argument("--num_rounds", type=int, default=2)
    parser.add_argument("--train_args", default="--epochs 1")
    parser.add_argument("--env", choices=["local", "sim"], default="local")
    parser.add_argument("--folder", type=os.path.abspath, help="for the run; by default a new one")
    given = parser.parse_args()
    recipe = FedAvgRecipe(
        name="hello-pt",
        model=SimpleNetwork(),
        min_sites=given.n_clients,
        num_rounds=given.num_rounds,
        train_script=Path(__file__).with_name("client.py"),
        train_args=given.train_args,
    )
    env = {"local": LocalEnv, "sim": SimEnv}[given.env]
    result = recipe.execute(env(sites=given.n_clients, folder=given.folder))
    print(f"model: {result.model}")
    print(f"metrics of the last round: {result.metrics}")


if __name__ == "__main__":
    main()
