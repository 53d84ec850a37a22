package main

import (
	"cmp"
	"os"
	"path/filepath"
)

// clone is the folder of the clone that this program was built in, or "".
// There bin/ holds the program and python/ the package with its library.
func clone() string {
	program, err := os.Executable()
	if err != nil {
		return ""
	}
	if program, err = filepath.EvalSymlinks(program); err != nil {
		return ""
	}
	root := filepath.Dir(filepath.Dir(program))
	if _, err := os.Stat(filepath.Join(root, "python", "autobyte", "libautobyte.so")); err != nil {
		return ""
	}
	return root
}

// defaultPython is the interpreter for workers when none is named:
// AUTOBYTE_PYTHON, the environment that make has linked into the clone's bin/,
// or python3.
func defaultPython() string {
	linked := ""
	if root := clone(); root != "" {
		linked = filepath.Join(root, "bin", "venv", "bin", "python")
		if _, err := os.Stat(linked); err != nil {
			linked = ""
		}
	}
	return cmp.Or(os.Getenv("AUTOBYTE_PYTHON"), linked, "python3")
}

// usePackage lets the workers import the clone's package, unless the user has
// said where packages are.
func usePackage() error {
	root := clone()
	if root == "" || os.Getenv("PYTHONPATH") != "" {
		return nil
	}
	return os.Setenv("PYTHONPATH", filepath.Join(root, "python"))
}
