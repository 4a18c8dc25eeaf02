"""`python -m irframework`: the command line."""

from irframework.cli import main

raise SystemExit(main())
