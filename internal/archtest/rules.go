package archtest

import (
	"fmt"
	"go/ast"
	"slices"
	"strconv"
	"strings"
)

// MaxLines is how long a source file may be. A longer one holds several ideas.
const MaxLines = 500

// CheckLength finds files of more than MaxLines lines, unless they are generated.
func CheckLength(tree *Tree) []Violation {
	var found []Violation
	for _, source := range tree.Sources {
		if source.Lines > MaxLines && !source.Generated {
			found = append(found, Violation{Path: source.Path,
				Text: fmt.Sprintf("has %d lines; at most %d are allowed: split it by idea", source.Lines, MaxLines)})
		}
	}
	return found
}

// CheckComments finds packages that have no package comment, or several, or one
// that does not begin with the package's name ("Package x ", or "Command x " for
// a program, where x is its folder). Test files carry it only where a package
// has nothing else.
func CheckComments(tree *Tree) []Violation {
	var found []Violation
	for _, pkg := range tree.Packages {
		want := "Package " + pkg.Name + " "
		if pkg.Name == "main" {
			want = "Command " + pkg.Dir[strings.LastIndex(pkg.Dir, "/")+1:] + " "
		}
		onlyTests := !slices.ContainsFunc(pkg.Files, func(f *File) bool { return !f.Test })
		var commented []string
		for _, file := range pkg.Files {
			doc := file.AST.Doc.Text()
			if doc == "" {
				continue
			}
			commented = append(commented, file.Path)
			line := file.line(file.AST.Doc.Pos())
			if file.Test && !onlyTests {
				found = append(found, Violation{file.Path, line, "a test file holds a package comment; move it to doc.go"})
			} else if !strings.HasPrefix(doc, want) {
				found = append(found, Violation{file.Path, line, fmt.Sprintf("the package comment must begin with %q", want)})
			}
		}
		switch {
		case len(commented) == 0:
			found = append(found, Violation{Path: pkg.Dir, Text: fmt.Sprintf("has no package comment; begin one with %q", want)})
		case len(commented) > 1:
			found = append(found, Violation{Path: pkg.Dir, Text: "has several package comments: " + strings.Join(commented, ", ")})
		}
	}
	return found
}

// processCalls are what library code never does, because the process is not
// its own: by import path, the names in it.
var processCalls = map[string][]string{
	"os":        {"Exit"},
	"syscall":   {"Exit"},
	"log":       {"Fatal", "Fatalf", "Fatalln", "Panic", "Panicf", "Panicln"},
	"os/signal": {"Notify", "NotifyContext", "Ignore", "Reset"},
}

var environmentCalls = map[string][]string{
	"os":      {"Getenv", "LookupEnv", "Environ", "ExpandEnv"},
	"syscall": {"Getenv", "Environ"},
}

// CheckProcess finds library code that ends the process, takes its signals, or
// reads the environment before main runs. Programs may: they own the process.
// cmd/libautobyte is no program, though package main: its process is the user's.
func CheckProcess(tree *Tree) []Violation {
	var found []Violation
	for _, pkg := range tree.Packages {
		if strings.HasPrefix(pkg.Dir, "cmd/") && !strings.HasPrefix(pkg.Dir, "cmd/libautobyte") {
			continue
		}
		readers := environmentReaders(pkg)
		for _, file := range pkg.Files {
			if file.Test {
				continue
			}
			names := importNames(file.AST)
			if importPath, dotted := names["."]; dotted {
				found = append(found, Violation{Path: file.Path,
					Text: fmt.Sprintf("imports %s with a dot, which hides whose functions it calls", importPath)})
			}
			ast.Inspect(file.AST, func(node ast.Node) bool {
				if call, ok := selected(node, names, processCalls); ok {
					found = append(found, Violation{file.Path, file.line(node.Pos()),
						call + " in library code: return an error and let the caller decide"})
				}
				return true
			})
			for _, decl := range file.AST.Decls {
				if !runsBeforeMain(decl) {
					continue
				}
				if what, node := readsEnvironment(decl, names, readers); node != nil {
					found = append(found, Violation{file.Path, file.line(node.Pos()),
						what + " reads the environment before main runs: take the value as an argument"})
				}
			}
		}
	}
	return found
}

// runsBeforeMain says whether a declaration is an init function or the
// initialiser of package variables.
func runsBeforeMain(decl ast.Decl) bool {
	switch decl := decl.(type) {
	case *ast.FuncDecl:
		return decl.Recv == nil && decl.Name.Name == "init"
	case *ast.GenDecl:
		return true
	}
	return false
}

// environmentReaders returns the package's functions that read the environment,
// themselves or through another of them.
func environmentReaders(pkg *Package) map[string]bool {
	readers := map[string]bool{}
	for grown := true; grown; {
		grown = false
		for _, file := range pkg.Files {
			if file.Test {
				continue
			}
			names := importNames(file.AST)
			for _, decl := range file.AST.Decls {
				fn, ok := decl.(*ast.FuncDecl)
				if !ok || fn.Recv != nil || fn.Name.Name == "init" || readers[fn.Name.Name] {
					continue
				}
				if _, node := readsEnvironment(fn, names, readers); node != nil {
					readers[fn.Name.Name] = true
					grown = true
				}
			}
		}
	}
	return readers
}

// readsEnvironment returns what in a declaration reads the environment. A
// function literal that is only stored in a variable does not run yet.
func readsEnvironment(decl ast.Decl, names map[string]string, readers map[string]bool) (what string, where ast.Node) {
	_, variable := decl.(*ast.GenDecl)
	var called *ast.FuncLit
	ast.Inspect(decl, func(node ast.Node) bool {
		if where != nil {
			return false
		}
		switch node := node.(type) {
		case *ast.CallExpr:
			if id, ok := node.Fun.(*ast.Ident); ok && readers[id.Name] {
				what, where = id.Name, node
			}
			called, _ = node.Fun.(*ast.FuncLit)
		case *ast.FuncLit:
			return !variable || node == called
		case *ast.SelectorExpr:
			if call, ok := selected(node, names, environmentCalls); ok {
				what, where = call, node
			}
		}
		return true
	})
	return what, where
}

// importNames maps the names under which a file knows its imports to their paths.
func importNames(file *ast.File) map[string]string {
	names := map[string]string{}
	for _, spec := range file.Imports {
		importPath, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			continue
		}
		name := importPath[strings.LastIndex(importPath, "/")+1:]
		if spec.Name != nil {
			name = spec.Name.Name
		}
		names[name] = importPath
	}
	return names
}

// selected says whether a node is package.Name with the name in the list of
// that package, and returns it as it is written in full. Taking such a function
// as a value counts like calling it.
func selected(node ast.Node, names map[string]string, lists map[string][]string) (string, bool) {
	selector, ok := node.(*ast.SelectorExpr)
	if !ok {
		return "", false
	}
	id, ok := selector.X.(*ast.Ident)
	if !ok {
		return "", false
	}
	importPath := names[id.Name]
	if !slices.Contains(lists[importPath], selector.Sel.Name) {
		return "", false
	}
	return importPath + "." + selector.Sel.Name, true
}
