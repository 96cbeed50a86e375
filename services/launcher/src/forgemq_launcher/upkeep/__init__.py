"""What a run consists of on one machine: engines, broker and services, kept up."""
