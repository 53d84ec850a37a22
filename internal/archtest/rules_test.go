package archtest_test

import (
	"strings"
	"testing"
	"testing/fstest"

	"autobyte/internal/archtest"
)

// table is a small one, in which low is below mid, and mid below top.
var table = []archtest.Row{
	{Dir: ".", Why: "the version"},
	{Dir: "low", Why: "knows nothing"},
	{Dir: "helper", TestOnly: true, Why: "for tests"},
	{Dir: "side", Why: "knows nothing"},
	{Dir: "mid", May: []string{"low"}, Why: "carries low and no more"},
	{Dir: "top", AllAbove: true, Why: "joins the parts"},
	{Dir: "late", Why: "stands below top"},
	{Dir: "cmd/tool", Any: true, Why: "a program"},
	{Dir: "cmd/libautobyte", May: []string{"top"}, Why: "the C interface"},
	{Dir: "internal/archtest", Why: "may be named in a sample"},
}

// load makes a tree of "path", "text" pairs, in the module example.
func load(t *testing.T, files ...string) *archtest.Tree {
	t.Helper()
	fsys := fstest.MapFS{"go.mod": {Data: []byte("module example\n\ngo 1.26\n")}}
	for i := 0; i < len(files); i += 2 {
		fsys[files[i]] = &fstest.MapFile{Data: []byte(files[i+1])}
	}
	tree, err := archtest.Load(fsys)
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

// expect compares what a rule found with the wanted messages, each given by
// words that it must contain, in order; none wanted means that it must be clean.
func expect(t *testing.T, found []archtest.Violation, want ...string) {
	t.Helper()
	for i, v := range found {
		if i >= len(want) {
			t.Errorf("unexpected: %s", v)
		} else if !strings.Contains(v.String(), want[i]) {
			t.Errorf("violation %d is %q, want it to contain %q", i, v, want[i])
		}
	}
	for _, missing := range want[min(len(found), len(want)):] {
		t.Errorf("not found: %s", missing)
	}
}

func TestCheckTable(t *testing.T) {
	expect(t, archtest.CheckTable(table))

	f := func(want string, rows ...archtest.Row) {
		t.Helper()
		expect(t, archtest.CheckTable(rows), want)
	}
	f("a: has two rows", archtest.Row{Dir: "a", Why: "x"}, archtest.Row{Dir: "a", Why: "x"})
	f("a: its row in the import table gives no reason", archtest.Row{Dir: "a"})
	f("allows b, which has no row above it", archtest.Row{Dir: "a", May: []string{"b"}, Why: "x"}, archtest.Row{Dir: "b", Why: "x"})
}

func TestCheckImports(t *testing.T) {
	f := func(file, imported string, want ...string) {
		t.Helper()
		tree := load(t, file, "package p\n\nimport _ \""+imported+"\"\n")
		expect(t, archtest.CheckImports(tree, table), want...)
	}
	// allowed
	f("mid/a.go", "example/low")
	f("mid/a.go", "example")
	f("mid/a.go", "net/http")
	f("mid/a_test.go", "example/mid")
	f("mid/a_test.go", "example/helper")
	f("mid/a_test.go", "pgregory.net/rapid")
	f("helper/a.go", "testing")
	f("top/a.go", "example/side")
	f("cmd/tool/a.go", "example/late")
	f("cmd/libautobyte/a.go", "C")
	f("testdata/a.go", "example/top")
	f("low/testdata/src/a.go", "example/top")

	// refused
	f("low/a.go", "example/mid", "low/a.go:3: low may not import mid: knows nothing")
	f("low/a_test.go", "example/mid", "low may not import mid")
	f("mid/a.go", "example/side", "mid may not import side: carries low and no more")
	f("top/a.go", "example/late", "top may not import late")
	f("top/a.go", "example/helper", "imports helper, which is test-only, in production code")
	f("cmd/tool/a.go", "example/helper", "test-only")
	f("cmd/tool/a.go", "testing", "imports testing, which is for tests")
	f("mid/a.go", "github.com/google/go-cmp/cmp", "which is for tests")
	f("mid/a.go", "example/unknown", "imports unknown, which is not in the import table")
	f("unknown/a.go", "fmt", "unknown: is not in the import table; add a row to internal/archtest/table.go")
	f("mid/a.go", "C", `imports "C", which only cmd/libautobyte`)
	f("cmd/tool/a.go", "C", `imports "C"`)
}

func TestCheckComments(t *testing.T) {
	f := func(want []string, files ...string) {
		t.Helper()
		expect(t, archtest.CheckComments(load(t, files...)), want...)
	}
	// right
	f(nil, "low/doc.go", "// Package low does it.\npackage low\n", "low/a.go", "package low\n", "low/a_test.go", "package low_test\n")
	f(nil, "low/a.go", "// A licence.\n\n// Package low does it.\npackage low\n")
	f(nil, "cmd/tool/main.go", "// Command tool does it.\npackage main\n")
	f(nil, "e2e/a_test.go", "// Package e2e tries it.\npackage e2e_test\n")

	// wrong
	f([]string{`low: has no package comment; begin one with "Package low "`}, "low/a.go", "package low\n")
	f([]string{"low: has several package comments: low/a.go, low/b.go"},
		"low/a.go", "// Package low does it.\npackage low\n", "low/b.go", "// Package low does more.\npackage low\n")
	f([]string{`low/a.go:1: the package comment must begin with "Package low "`}, "low/a.go", "// This does it.\npackage low\n")
	f([]string{`must begin with "Package low "`}, "low/a.go", "// Package lower does it.\npackage low\n")
	f([]string{`must begin with "Command tool "`}, "cmd/tool/main.go", "// Package main does it.\npackage main\n")
	f([]string{"low/a_test.go:1: a test file holds a package comment", "several"},
		"low/a.go", "// Package low does it.\npackage low\n", "low/a_test.go", "// Package low tests it.\npackage low\n")
}

func TestCheckLength(t *testing.T) {
	f := func(file, text string, want ...string) {
		t.Helper()
		expect(t, archtest.CheckLength(load(t, file, text)), want...)
	}
	lines := func(n int) string { return strings.Repeat("\n", n) }

	f("low/a.go", "package low"+lines(500))
	f("py/a.py", lines(500))
	f("low/a.go", "// Code generated by hand. DO NOT EDIT.\npackage low"+lines(600))
	f("py/a.py", "# Code generated by hand. DO NOT EDIT."+lines(600))
	f("README.md", lines(600))
	f("LICENSE", lines(600))
	f("tools/testdata/a.py", lines(600))

	f("low/a.go", "package low"+lines(501), "low/a.go: has 501 lines; at most 500 are allowed")
	f("low/a_test.go", "package low"+lines(501), "501 lines")
	f("py/a.py", lines(501), "py/a.py: has 501 lines")
	f("tools/run.sh", lines(501), "501 lines")
	f("tools/run", "#!/bin/sh"+lines(501), "501 lines")
	f(".ci/run", "#!/bin/sh"+lines(501), "501 lines")
}

func TestCheckProcess(t *testing.T) {
	f := func(file, code string, want ...string) {
		t.Helper()
		text := `package p
import ("os"; "log"; "os/signal"; "syscall"; other "os")
` + code
		expect(t, archtest.CheckProcess(load(t, file, text)), want...)
	}
	// library code may
	f("low/a.go", `func Dir() string { return os.Getenv("HOME") }`)
	f("low/a.go", `var read = func() string { return os.Getenv("HOME") }`)
	f("low/a.go", `func (x T) init() { os.Getenv("HOME") }`)
	f("low/a.go", `func init() { x = os.Args }`)
	f("low/a.go", `func F() { log.Print("x"); signal.Stop(nil); syscall.Kill(1, 9) }`)
	f("low/a_test.go", `func TestMain(m *M) { os.Exit(m.Run()) }`)
	// a program may
	f("cmd/tool/a.go", `func main() { signal.NotifyContext(); os.Exit(1) }`)

	// library code may not
	f("low/a.go", `func F() { os.Exit(1) }`, "low/a.go:3: os.Exit in library code")
	f("low/a.go", `func F() { other.Exit(1) }`, "os.Exit in library code")
	f("low/a.go", `var exit = os.Exit`, "os.Exit in library code")
	f("low/a.go", `func F() { log.Fatalf("x") }`, "log.Fatalf in library code")
	f("low/a.go", `func F() { signal.Notify(nil) }`, "os/signal.Notify in library code")
	f("low/a.go", `func F() { syscall.Exit(1) }`, "syscall.Exit in library code")
	f("cmd/libautobyte/a.go", `func F() { os.Exit(1) }`, "os.Exit in library code")
	f("low/a.go", `func init() { x = os.Getenv("X") }`, "low/a.go:3: os.Getenv reads the environment before main runs")
	f("low/a.go", `var x = os.Getenv("X")`, "os.Getenv reads the environment")
	f("low/a.go", `var x, _ = other.LookupEnv("X")`, "os.LookupEnv reads the environment")
	f("low/a.go", `var x = func() string { return os.Getenv("X") }()`, "os.Getenv reads the environment")
	f("low/a.go", "func init() { a() }\nfunc a() { b() }\nfunc b() { os.Environ() }", "a reads the environment")
	expect(t, archtest.CheckProcess(load(t, "low/a.go", "package low\nimport . \"os\"\nfunc F() { Exit(1) }")), "imports os with a dot")
}

func TestLoadRefuses(t *testing.T) {
	f := func(want string, fsys fstest.MapFS) {
		t.Helper()
		if _, err := archtest.Load(fsys); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want it to contain %q", err, want)
		}
	}
	f("no go.mod", fstest.MapFS{})
	f("no module line", fstest.MapFS{"go.mod": {Data: []byte("go 1.26\n")}})
	f("a.go:1", fstest.MapFS{"go.mod": {Data: []byte("module example\n")}, "a.go": {Data: []byte("pakage low\n")}})
}
