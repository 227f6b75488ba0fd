"""One file that lists the commands of a whole job: `llmconv run`."""
