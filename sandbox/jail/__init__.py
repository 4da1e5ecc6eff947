"""Everything that touches untrusted code: process set-up, limits, frames and the program inside a runner."""
