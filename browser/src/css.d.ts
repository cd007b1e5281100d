declare module "*.css" {
  const style: string;
  export default style;
}
