"""`pdlaunch doctor`: facts are gathered first, then judged by pure functions. Mends nothing."""
