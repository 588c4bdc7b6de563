"""When the graph is made by itself: sensors, schedules, jobs and their limits."""
