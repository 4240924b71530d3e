"""What Flower's quickstart-pytorch does in two functions of a ClientApp, here in one loop.

docs/from-flower.md goes through it line by line.
"""

import argparse

from task import Net, load_data, test, train

import atoll


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--partitions", type=int, default=2, help="how many sites share the data")
    parser.add_argument("--local-epochs", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--batch-size", type=int, default=32)
    given = parser.parse_args()
    net = Net()

    with atoll.join() as worker:
        partition = int(worker.site.rpartition("-")[2]) % given.partitions
        train_loader, test_loader = load_data(partition, given.partitions, given.batch_size)
        for fl_round in worker:
            fl_round.load_into(net)
            eval_loss, eval_accuracy = test(net, test_loader)  # the global model, on this site's data
            train_loss = train(net, train_loader, given.local_epochs, given.learning_rate)
            fl_round.submit(
                net,
                weight=len(train_loader.dataset),
                metrics={"train_loss": train_loss, "eval_loss": eval_loss, "eval_accuracy": eval_accuracy},
            )


if __name__ == "__main__":
    main()
