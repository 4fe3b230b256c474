"""What people operate Baton with: the command line, benchmarks, the trace viewer."""
