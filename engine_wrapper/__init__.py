"""Makes an engine run a reuse plan: layer schedules, the forward that follows them, and the guard on publication."""
