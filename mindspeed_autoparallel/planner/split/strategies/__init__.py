"""Search strategies by shape of problem: chains, parallel branches, virtual stages, long steps."""
