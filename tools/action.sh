# What the steps of action.yml share; `source` it. Bash 3.2 is enough, which macOS has.

# Sets the array `words` to the words of a text by the rules of a shell (quotes keep blanks together), without running or expanding anything.
split_words() {
  local text
  text=$(python -c 'import shlex, sys; print("\n".join(shlex.split(sys.argv[1])))' "$1") || {
    echo "error: no closing quotation in the options: $1" >&2
    return 2
  }
  split_lines "$text"
}

# Sets the array `words` to the lines of a text that are not empty.
split_lines() {
  local line
  words=()
  while IFS= read -r line; do
    if [ -n "$line" ]; then words+=("$line"); fi
  done <<< "$1"
}
