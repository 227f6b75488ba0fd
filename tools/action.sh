# What the steps of action.yml share; `source` it. Bash 3.2 is enough, which macOS has.

# Sets the array `words` to the words of a text by the rules of a shell (quotes keep blanks together), without running
# or expanding anything: Python quotes every word before `eval` reads it.
split_words() {
  local quoted
  quoted=$(python -I -c 'import shlex, sys; print(shlex.join(shlex.split(sys.argv[1])))' "$1" 2> /dev/null) || {
    echo "error: no closing quotation in the options: $1" >&2
    return 2
  }
  eval "words=($quoted)"
}

# Sets the array `words` to the lines of a text that are not empty.
split_lines() {
  local line
  words=()
  while IFS= read -r line; do
    if [ -n "$line" ]; then words+=("$line"); fi
  done <<< "$1"
}

# Refuses an output among the words: the step that comes next would read another folder.
refuse_output() {
  local word
  for word in "${words[@]}"; do
    case $word in
      -o* | --out*)
        echo "error: \`$word\` among the options: give the input \`$1\`" >&2
        return 2
        ;;
    esac
  done
}
