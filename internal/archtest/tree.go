package archtest

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// A Tree is every source file of a module, parsed where it is Go. Build
// constraints are not looked at: a rule holds on every platform.
type Tree struct {
	Module   string     // the module path of go.mod
	Packages []*Package // sorted by Dir
	Sources  []Source   // Go and other languages, sorted by Path
}

// A Package is the Go files of one folder, tests included.
type Package struct {
	Dir   string // relative to the root, with slashes; "." is the root
	Name  string // as its files say, without the suffix _test
	Files []*File
}

// A File is one parsed Go file.
type File struct {
	Path string
	Test bool // *_test.go
	AST  *ast.File
	fset *token.FileSet
}

// A Source is any file that people write code in.
type Source struct {
	Path      string
	Lines     int
	Generated bool
}

// A Violation is one place where a rule is broken.
type Violation struct {
	Path string
	Line int // 0: the file or folder as a whole
	Text string
}

func (v Violation) String() string {
	if v.Line == 0 {
		return v.Path + ": " + v.Text
	}
	return fmt.Sprintf("%s:%d: %s", v.Path, v.Line, v.Text)
}

var (
	moduleLine    = regexp.MustCompile(`(?m)^module\s+(\S+)`)
	generatedLine = regexp.MustCompile(`(?m)^(//|#|/\*) ?Code generated .* DO NOT EDIT\.`)
	shebang       = []byte("#!")
)

// Load reads the tree below the root of fsys, which has a go.mod. It leaves out
// testdata and what is not source: hidden folders other than .ci, and those
// that builds and installs write.
func Load(fsys fs.FS) (*Tree, error) {
	mod, err := fs.ReadFile(fsys, "go.mod")
	if err != nil {
		return nil, fmt.Errorf("the root of the tree has no go.mod: %w", err)
	}
	module := moduleLine.FindSubmatch(mod)
	if module == nil {
		return nil, fmt.Errorf("go.mod has no module line")
	}
	tree := &Tree{Module: string(module[1])}
	packages := map[string]*Package{}
	err = fs.WalkDir(fsys, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if skipped(name) {
				return fs.SkipDir
			}
			return nil
		}
		if !entry.Type().IsRegular() {
			return nil
		}
		return tree.add(fsys, name, packages)
	})
	if err != nil {
		return nil, err
	}
	for _, dir := range slices.Sorted(maps.Keys(packages)) {
		tree.Packages = append(tree.Packages, packages[dir])
	}
	return tree, nil
}

func skipped(dir string) bool {
	switch base := path.Base(dir); base {
	case ".", ".ci":
		return false
	case "testdata", "node_modules", "__pycache__":
		return true
	default:
		return strings.HasPrefix(base, ".") || strings.HasPrefix(base, "_") || dir == "bin" || dir == "demo" ||
			dir == "python/build" || dir == "python/dist" || strings.HasSuffix(dir, ".egg-info")
	}
}

// add reads one file and, when it is source, notes it.
func (t *Tree) add(fsys fs.FS, name string, packages map[string]*Package) error {
	ext := path.Ext(name)
	switch ext {
	case ".go", ".py", ".sh", ".c", ".h", ".s", ".ts", ".tsx", ".js", ".css", "":
	default:
		return nil
	}
	text, err := fs.ReadFile(fsys, name)
	if err != nil {
		return err
	}
	if ext == "" && !bytes.HasPrefix(text, shebang) {
		return nil // LICENSE, Makefile and the like; scripts have a first line that says so
	}
	t.Sources = append(t.Sources, Source{
		Path:      name,
		Lines:     bytes.Count(text, []byte("\n")),
		Generated: generatedLine.Match(text),
	})
	if ext != ".go" {
		return nil
	}
	fset := token.NewFileSet()
	parsed, err := parser.ParseFile(fset, name, text, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	dir := path.Dir(name)
	pkg := packages[dir]
	if pkg == nil {
		pkg = &Package{Dir: dir, Name: strings.TrimSuffix(parsed.Name.Name, "_test")}
		packages[dir] = pkg
	}
	pkg.Files = append(pkg.Files, &File{Path: name, Test: strings.HasSuffix(name, "_test.go"), AST: parsed, fset: fset})
	return nil
}

func (f *File) line(pos token.Pos) int { return f.fset.Position(pos).Line }

// imports calls yield with each import's path and the line it stands on.
func (f *File) imports(yield func(importPath string, line int)) {
	for _, spec := range f.AST.Imports {
		if importPath, err := strconv.Unquote(spec.Path.Value); err == nil {
			yield(importPath, f.line(spec.Pos()))
		}
	}
}

// ours returns the folder of an import path of this module, or false.
func (t *Tree) ours(importPath string) (string, bool) {
	if importPath == t.Module {
		return ".", true
	}
	return strings.CutPrefix(importPath, t.Module+"/")
}
