"""Records that nobody ran, for tests of what is made from records."""


def record(method, lr, losses, seed=0, accuracy=0.5, **config):
    """A run with these losses, None where it diverged."""
    rows = [
        {"epoch": k, "train_loss": loss, "diverged": loss is None, "test_accuracy": accuracy, "dead_share": 0.0,
         "seconds": 0.5, "steps": 10}
        for k, loss in enumerate(losses, start=1)
    ]  # fmt: skip
    setting = {"model": "paper_cnn", "data": "CIFAR-10", "batch_size": 64, "epochs": len(losses), "options": {}}
    return {
        "config": {"method": method, "lr": lr, "seed": seed, **setting, **config},
        "seed": seed,
        "metrics": rows,
        "environment": {"torch": "2.9.0", "python": "3.12", "device": "a CPU", "threads": 1},
        "commit": "abc123",
        "time": "2026-01-01T00:00:00+00:00",
    }
