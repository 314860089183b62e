"""What the library costs: ``python -m benchmarks``, or ``make bench``; method and figures in docs/comparison.md."""
