"""``python -m gpuidle``."""

from gpuidle.agent.cli import main

main()
