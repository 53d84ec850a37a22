// Package archtest holds the rules of this tree that a compiler does not check:
// which package may import which, how packages are commented, how long files
// are, and what library code never does. Its test applies them to the whole
// tree. Every rule is a function from a [Tree] to [Violation] values, so that
// samples that break it can be given to it too.
package archtest
